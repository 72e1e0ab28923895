"""A speculator that copies every view it is shown. It knows the right continuations and hides them in its drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, VerifyPlan, register_speculator

Node = tuple[int, int]  # parent column and token of columns 1, 2, ...


def frozen(view: Any) -> SimpleNamespace:
    """A copy of a view that later steps do not change, dataclasses inside it included."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return frozen(value) if is_dataclass(value) else value

    return SimpleNamespace(**{item.name: copied(getattr(view, item.name)) for item in fields(view)})


@dataclass
class StepRecord:
    """What the hooks of one step were given, in call order.

    Attributes:
        finished: Arguments of `request_finished` since the step before.
        started: Arguments of `request_started`.
        plan: PlanView.
        plan_kind: Kind of the plan that was verified.
        verified: The plan that was verified.
        output: VerifyOutput.
        observation: StepObservation, None for a step that sampled nothing.
        proposal: ProposeView.
    """

    finished: list[tuple[str, int, tuple[int, ...]]]
    started: list[tuple[str, int, tuple[int, ...]]]
    plan: SimpleNamespace
    plan_kind: str = ""
    verified: SimpleNamespace | None = None
    output: SimpleNamespace | None = None
    observation: SimpleNamespace | None = None
    proposal: SimpleNamespace | None = None


@register_speculator("witness")
@dataclass(frozen=True, kw_only=True)
class WitnessConfig(SpeculatorConfig):
    """Settings.

    Attributes:
        answers: Prompt and its continuation, longer than any request asks for.
        vocab_size: Of the target.
        width: 1 drafts chains through the engine's own buffer; 2 trees whose right nodes are second children.
        hidden_states: As declared.
        drafting: As declared.
        log: Receives a record of every step.
    """

    answers: Sequence[tuple[int, ...]]
    vocab_size: int
    width: int = 1
    hidden_states: str = "last"
    drafting: str = "device"
    log: list[StepRecord] = field(default_factory=list)

    def declare_resources(self):
        return SpecResources(
            max_candidates=self.num_speculative_tokens + 1,
            max_branching=self.width,
            hidden_states=self.hidden_states,
            drafting=self.drafting,
        )

    def create(self, resources, host, device):
        return Witness(self)


class Witness(BaseSpeculator):
    """Every third round is right to the end, the others at random."""

    def __init__(self, config: WitnessConfig) -> None:
        self.config, self.random = config, random.Random(5)
        self.trees: dict[int, list[Node]] = {}
        self.finished: list[tuple[str, int, tuple[int, ...]]] = []
        self.started: list[tuple[str, int, tuple[int, ...]]] = []

    def request_started(self, request_id, req_idx, token_ids):
        self.started.append((request_id, req_idx, tuple(token_ids)))
        self.trees[req_idx] = []

    def request_finished(self, request_id, req_idx, token_ids):
        self.finished.append((request_id, req_idx, tuple(token_ids)))

    def plan(self, view):
        self.config.log.append(StepRecord(self.finished, self.started, frozen(view)))
        self.finished, self.started = [], []
        if self.config.width == 1:
            return None
        shape = (len(view.req_idx), view.num_columns)
        token_ids = torch.full(shape, -1)
        parents = torch.full(shape, -1, dtype=torch.int32)
        num_candidates = view.max_rows.clone()
        for r, (slot, rows) in enumerate(zip(view.req_idx.tolist(), view.max_rows.tolist(), strict=True)):
            nodes = self.trees[slot][: max(0, rows - 1)]
            num_candidates[r] = min(rows, 1 + len(nodes))
            for column, (parent, token) in enumerate(nodes, 1):
                token_ids[r, column], parents[r, column] = token, parent
        return VerifyPlan(token_ids, num_candidates, parents)

    def accept(self, plan, output):
        record = self.config.log[-1]
        record.plan_kind, record.verified, record.output = plan.kind, frozen(plan), frozen(output)

    def observe_step(self, observation):
        self.config.log[-1].observation = frozen(observation)

    def propose(self, view):
        self.config.log[-1].proposal = frozen(view)
        for r, slot in enumerate(view.req_idx.tolist()):
            if int(view.result.num_committed[r]) == 0:
                continue
            known = view.token_history[slot, : int(view.num_computed_tokens[r]) + 1].tolist()
            nodes = self._nodes(self._future(known))
            self.trees[slot] = nodes
            if self.config.width == 1:
                drafts = [token for _, token in nodes]
                view.draft_token_ids[slot, : len(drafts)] = torch.tensor(drafts)

    def _future(self, known: list[int]) -> tuple[int, ...]:
        """The right continuation; a request whose history is not as told gets none, and its views will be refused."""
        return next((whole[len(known) :] for whole in self.config.answers if list(whole[: len(known)]) == known), ())

    def _nodes(self, future: tuple[int, ...]) -> list[Node]:
        """Nodes for K drafts: a number of right levels, each behind a wrong sibling when trees are drafted."""
        count, width = self.config.num_speculative_tokens, self.config.width
        levels = min(len(future), -(-count // width))
        right = levels if self.random.random() < 0.34 else self.random.randint(0, levels)
        nodes: list[Node] = []
        tip = 0
        for level in range(levels):
            wrong = (future[level] + 1) % self.config.vocab_size
            nodes += [(tip, wrong)] * (width - 1)
            nodes.append((tip, future[level] if level < right else wrong))
            tip = len(nodes)
        return nodes[:count]


def witness(answers: Sequence[tuple[int, ...]], drafts: int, **values: Any) -> Mapping[str, Any]:
    """`speculative_config` of a witness."""
    return {"method": "witness", "num_speculative_tokens": drafts, "answers": tuple(answers), **values}
