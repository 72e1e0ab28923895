"""`draft_model`: a smaller language model drafts, as a chain or as a beam-shaped tree, with KV of its own.

The tree keeps the best `max_branching` continuations of each level by the drafter's own probability, as in EAGLE-2
(arXiv 2406.16858). Sampled requests draft with the target's noise, so that drafter and target agree as often as their
laws do (`match`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specround.contract import (
    BaseSpeculator,
    ConfigError,
    DraftHost,
    DraftRows,
    PlanView,
    ProposeView,
    SpecResources,
    SpeculatorConfig,
    VerifyPlan,
    register_speculator,
)
from specround.kernels.acceptance.philox import gumbel_noise
from specround.speculators.tree_drafts import TreeDrafts

if TYPE_CHECKING:
    from specround.contract import DraftModel


@register_speculator("draft_model")
@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(SpeculatorConfig):
    """A smaller model drafts a chain or a tree.

    Attributes:
        model: The drafter: anything `LLM(model=...)` takes, with the target's tokenizer.
        max_branching: 1 drafts a chain of K tokens; W > 1 a tree of K tokens with W per level.

    Raises:
        ConfigError: A field is out of range.

    Example:
        >>> LLM("target", {"method": "draft_model", "model": "drafter", "num_speculative_tokens": 6})
    """

    model: str
    max_branching: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("speculative_config.model", self.model, "a directory, a .gguf file, an alias or a hub id")
        width = self.max_branching
        if not isinstance(width, int) or isinstance(width, bool) or not 1 <= width <= self.num_speculative_tokens:
            allowed = f"an integer of 1 to num_speculative_tokens={self.num_speculative_tokens}"
            raise ConfigError("max_branching", width, allowed)

    def declare_resources(self) -> SpecResources:
        """A chain, or a tree with `max_branching` nodes per level."""
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, max_branching=self.max_branching)

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> BaseSpeculator:
        """Load the drafter."""
        model = host.load_model(self.model)
        if model.vocab_size < self.max_branching:
            allowed = f"at most the drafter's vocabulary of {model.vocab_size}"
            raise ConfigError("max_branching", self.max_branching, allowed)
        return DraftModelSpeculator(resources, host, device, model)


class DraftModelSpeculator(BaseSpeculator):
    """Drafts level by level with a model. Everything stays on the device.

    Args:
        resources: Declared resources.
        host: Runs the model.
        device: Where buffers live.
        model: The drafter.
    """

    def __init__(self, resources: SpecResources, host: DraftHost, device: torch.device, model: DraftModel) -> None:
        self._host, self._model = host, model
        self._width = resources.max_branching
        self._drafts = TreeDrafts(host.max_num_seqs + 1, resources.max_candidates, device)
        self._vocab_size = min(model.vocab_size, host.vocab_size)

    def bind_resources(self, effective: SpecResources) -> None:
        """Draft a chain when trees were lowered away."""
        self._width = effective.max_branching

    def request_started(self, request_id: str, req_idx: int, token_ids: object) -> None:
        """Forget the slot's former drafts."""
        self._drafts.clear(req_idx)

    def plan(self, view: PlanView) -> VerifyPlan:
        """The drafted chain or tree."""
        return self._drafts.plan(view, as_chain=self._width == 1)

    def absorb(self, view: ProposeView) -> None:
        """Run the step's committed rows through the drafter, so that its KV follows the target's."""
        self._drafts.token_ids.index_fill_(0, view.req_idx, -1)
        rows = DraftRows(
            req_idx=view.row_req_idx,
            positions=view.positions.clamp(min=0),
            slots=view.positions,
            parents=torch.full_like(view.positions, -1),
            num_rows=view.num_rows,
        )
        self._host.begin(rows)
        self._model.forward(view.input_ids, rows.positions)

    def propose(self, view: ProposeView) -> None:
        """Absorb the step, then draft `budget - 1` tokens from the new root."""
        self.absorb(view)
        wanted = view.budget - 1
        columns = self._drafts.token_ids.shape[1]
        tree = _GrowingTree(view, columns, self._model.max_model_len, is_chain=self._width == 1)
        logits = self._forward(view, tree.root_rows(view))
        for start in range(1, wanted + 1, self._width):
            width = min(self._width, wanted + 1 - start)
            tree.grow(self._scores(view, logits, tree), start, width)
            if start + width <= wanted:
                logits = self._forward(view, tree.frontier_rows(view))
        self._drafts.write(view.req_idx, tree.token_ids, tree.parents)

    def _forward(self, view: ProposeView, rows: tuple[DraftRows, Tensor]) -> Tensor:
        """Logits `[R, F, V]` of the frontier's rows."""
        announced, token_ids = rows
        self._host.begin(announced)
        hidden = self._model.forward(token_ids, announced.positions)
        logits = self._model.logits(hidden)[:, : self._vocab_size]
        return logits.view(view.req_idx.shape[0], -1, self._vocab_size)

    def _scores(self, view: ProposeView, logits: Tensor, tree: _GrowingTree) -> Tensor:
        """Log-probabilities of the next tokens, with the target's temperature and noise for sampled requests."""
        if not view.any_sampled:
            return logits.log_softmax(-1)
        temperature = view.sampling.temperature[view.req_idx]
        sampled = (temperature > 0).to(logits.dtype)[:, None]
        token_index = view.num_computed_tokens.to(torch.int64) + tree.depth + 1
        noise = gumbel_noise(view.seeds[view.req_idx], token_index, logits.shape[-1]) * sampled
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        return (scaled + noise[:, None]).log_softmax(-1)


class _GrowingTree:
    """The drafts of one `propose`, level by level; F nodes form the frontier, at first the root alone.

    Args:
        view: The step.
        columns: C, columns of the draft buffer.
        max_model_len: The drafter's context; nothing is drafted past it.
        is_chain: Rows continue the plain context instead of a tree, so that a chain has no limit of 64 columns.
    """

    def __init__(self, view: ProposeView, columns: int, max_model_len: int, *, is_chain: bool) -> None:
        count, device = view.req_idx.shape[0], view.req_idx.device
        self.depth = 0
        self.token_ids = torch.full((count, columns), -1, dtype=torch.int64, device=device)
        self.parents = torch.full((count, columns), -1, dtype=torch.int32, device=device)
        self._root = view.num_computed_tokens.to(torch.int64)[:, None]
        self._max_model_len, self._is_chain = max_model_len, is_chain
        self._live = (view.result.num_committed > 0)[:, None] & (self._root < max_model_len)
        self._columns = torch.zeros(count, 1, dtype=torch.int64, device=device)
        self._scores = torch.zeros(count, 1, device=device)
        self._frontier = view.root_token_ids[:, None]

    def root_rows(self, view: ProposeView) -> tuple[DraftRows, Tensor]:
        """The new root's row: it continues the plain context and is the base of the tree."""
        root = self._root[:, 0]
        rows = DraftRows(
            req_idx=view.req_idx,
            positions=root,
            slots=torch.where(self._live[:, 0], root, -1),
            parents=torch.full_like(root, -1),
            num_rows=(1,) * root.shape[0],
        )
        return rows, view.root_token_ids

    def frontier_rows(self, view: ProposeView) -> tuple[DraftRows, Tensor]:
        """Rows of the frontier, R * F of them, at the slots of their columns."""
        root = self._root
        parents = self.parents.to(torch.int64).gather(1, self._columns)
        width = self._columns.shape[1]
        rows = DraftRows(
            req_idx=view.req_idx.repeat_interleave(width),
            positions=(root + self.depth).expand_as(self._columns).flatten(),
            slots=torch.where(self._live, root + self._columns, -1).flatten(),
            parents=(torch.full_like(parents, -1) if self._is_chain else root + parents).flatten(),
            num_rows=(width,) * root.shape[0],
        )
        return rows, self._frontier.flatten()

    def grow(self, scores: Tensor, start: int, width: int) -> None:
        """Add a level: the `width` best continuations of the frontier, best first, in columns `start ...`.

        Args:
            scores: `[R, F, V]` log-probabilities.
            start: First column of the level.
            width: Nodes to add.
        """
        best = scores.topk(min(width, scores.shape[-1]), dim=-1)
        total = (self._scores[:, :, None] + best.values).flatten(1)
        chosen = total.topk(width, dim=-1)
        parent = self._columns.gather(1, chosen.indices // best.values.shape[-1])
        tokens = best.indices.flatten(1).gather(1, chosen.indices)
        self.token_ids[:, start : start + width] = torch.where(self._live, tokens, -1)
        self.parents[:, start : start + width] = parent.to(torch.int32)
        self._columns = torch.arange(start, start + width, device=tokens.device).expand_as(tokens)
        self._scores, self._frontier = chosen.values, tokens
        self.depth += 1
        self._live = self._live & (self._root + self.depth < self._max_model_len)
