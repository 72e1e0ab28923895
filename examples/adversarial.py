"""A speculator that tries to break the engine: every shape of tree, wrong tokens, right tokens in awkward places.

It is told in advance what plain decoding generates (`answers`, by prompt), so that its trees can hide the right
continuation where faults show: in children that are never first, below many wrong siblings, beside duplicates,
next to probe rows that see too little. Every other round it plans nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, VerifyPlan, register_speculator
from specround.contract import DraftHost, PlanView, ProposeView

Columns = list[tuple[int, int]]  # (parent column, token) of columns 1, 2, ...


@register_speculator("adversarial")
@dataclass(frozen=True, kw_only=True)
class AdversarialConfig(SpeculatorConfig):
    """Settings.

    Attributes:
        vocab_size: Wrong tokens are drawn below it.
        answers: Prompt tokens to the tokens that plain decoding generates.
        use_masks: Add probe rows and explicit positions.
        seed: Of the random choices.
    """

    vocab_size: int
    answers: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    use_masks: bool = False
    seed: int = 0

    def declare_resources(self) -> SpecResources:
        """Trees of any branching, drafted on the host."""
        columns = self.num_speculative_tokens + 1
        return SpecResources(
            max_candidates=columns,
            max_branching=max(2, columns),
            custom_mask=self.use_masks,
            drafting="host",
        )

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> BaseSpeculator:
        """Build the speculator."""
        return AdversarialSpeculator(self, resources, host, device)


class AdversarialSpeculator(BaseSpeculator):
    """Draws a new shape for every request and round."""

    def __init__(
        self, config: AdversarialConfig, resources: SpecResources, host: DraftHost, device: torch.device
    ) -> None:
        self.config, self.random = config, random.Random(config.seed)
        slots, columns = host.max_num_seqs + 1, resources.max_candidates
        self.token_ids = torch.full((slots, columns), -1, dtype=torch.int64, device=device)
        self.parents = torch.full((slots, columns), -1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(slots, columns, dtype=torch.int32, device=device)
        self.mask = torch.zeros(slots, columns, columns, dtype=torch.bool, device=device)
        self.tokens: dict[str, list[int]] = {}
        self.kind = resources.kind
        self.round = 0

    def bind_resources(self, effective: SpecResources) -> None:
        """Stay at or below what is left."""
        self.kind = effective.kind

    def request_started(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Nothing is drafted before the first propose."""
        self.tokens[request_id] = list(token_ids)
        self.token_ids[req_idx].fill_(-1)

    def request_finished(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Forget the request."""
        self.tokens.pop(request_id, None)

    def propose(self, view: ProposeView) -> None:
        """Draw the next round's trees."""
        assert view.host is not None
        self.round += 1
        for request_id, req_idx, committed, room in zip(
            view.host.request_ids, view.host.req_idx, view.host.committed, view.host.max_drafts, strict=True
        ):
            self.tokens[request_id] += committed
            self.token_ids[req_idx].fill_(-1)
            if committed and room > 0 and self.round % 2:
                self._write(req_idx, self._columns(self._future(request_id), room))

    def plan(self, view: PlanView) -> VerifyPlan:
        """Gather the drawn trees."""
        columns = view.num_columns
        token_ids = self.token_ids[view.req_idx][:, :columns]
        drafted = (token_ids[:, 1:] >= 0).to(torch.int32).cumprod(1).sum(1) + 1
        masked = self.kind == "mask"
        return VerifyPlan(
            token_ids=token_ids,
            num_candidates=torch.minimum(drafted.to(torch.int32), view.max_rows),
            parents=None if self.kind == "chain" else self.parents[view.req_idx][:, :columns],
            positions=self.positions[view.req_idx][:, :columns] if masked else None,
            mask=self.mask[view.req_idx][:, :columns, :columns] if masked else None,
        )

    def _future(self, request_id: str) -> list[int]:
        """What plain decoding generates from here on, as far as it is known."""
        known = self.tokens[request_id]
        for prompt, answer in self.config.answers.items():
            whole = [*prompt, *answer]
            if tuple(known[: len(prompt)]) == prompt and whole[: len(known)] == known:
                return whole[len(known) :]
        return []

    def _wrong(self, right: int | None) -> int:
        token = self.random.randrange(self.config.vocab_size)
        return token if token != right else (token + 1) % self.config.vocab_size

    def _columns(self, future: list[int], room: int) -> Columns:
        """One tree of at most `room` drafts; the right path's length is random, and so is all around it."""
        if self.kind == "chain":
            right = self.random.randint(0, room)
            return [(i, future[i] if i < min(right, len(future)) else self._wrong(None)) for i in range(room)]
        right = self.random.randint(0, min(len(future), room))
        shape = self.random.choice(["last child", "random", "comb", "duplicates"])
        columns: Columns = []
        tip, depth = 0, 0  # the column where the right path ends so far, and its depth
        while len(columns) < room:
            wanted = future[depth] if depth < right else None
            if wanted is not None and (shape != "random" or self.random.random() < 0.5):
                if len(columns) + 1 < room and shape in ("last child", "comb"):
                    columns.append((tip, self._wrong(wanted)))
                columns.append((tip, wanted))
                if shape == "duplicates" and len(columns) < room:
                    columns.append((tip, wanted))  # equal siblings: the lower column wins, below it the path goes on
                    tip = len(columns) - self.random.randint(0, 1)
                else:
                    tip = len(columns)
                depth += 1
            else:
                parent = self.random.randint(0, len(columns))
                columns.append((parent, self._wrong(wanted if parent == tip else None)))
        return columns

    def _write(self, req_idx: int, columns: Columns) -> None:
        depth, ancestors = [0], [{0}]
        for column, (parent, token) in enumerate(columns, 1):
            depth.append(depth[parent] + 1)
            ancestors.append(ancestors[parent] | {column})
            self.token_ids[req_idx, column] = token
            self.parents[req_idx, column] = parent
            self.positions[req_idx, column] = depth[column]
            self.mask[req_idx, column] = False
            self.mask[req_idx, column, list(ancestors[column])] = True
        if self.kind == "mask":
            for column in range(1, len(columns) + 1):
                if self.random.random() < 0.15:  # a probe: it hides an ancestor or sits at another position
                    hidden = self.random.choice(sorted(ancestors[column]))
                    self.mask[req_idx, column, hidden] = False
                    self.positions[req_idx, column] += self.random.randint(0, 2)
