"""`RoundBatch`: what a host tells the round about one step. Host values fix shapes, device tensors carry the counts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specround.contract import PlanView, SamplingView
from specround.kernels.state_commit import StateTables


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The part of a step that the host knows; equal shapes can replay one graph.

    Attributes:
        num_rows: Rows of each request, batch order.
        num_plan_rows: How many of them are plan rows: 0 for a prefill that does not end, 1 for one that does, up to C
            in decode. Plan rows are the last ones.
        kv_bounds: Upper bound of each request's visible slots, plan rows included.
        num_sampled_rows: Logits rows that are sampled rather than greedy.
    """

    num_rows: tuple[int, ...]
    num_plan_rows: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    num_sampled_rows: int

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.num_rows)

    @property
    def total_rows(self) -> int:
        """T, packed rows."""
        return sum(self.num_rows)

    @property
    def num_columns(self) -> int:
        """C, the most plan rows of any request, at least 1."""
        return max(1, *self.num_plan_rows) if self.num_plan_rows else 1

    @property
    def num_logits_rows(self) -> int:
        """Rows that need logits: all plan rows."""
        return sum(self.num_plan_rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundBatch:
    """One step's requests on the device, batch order.

    Attributes:
        shape: What the host knows.
        req_idx: `[R]` int64, persistent slot of each request.
        row_start: `[R + 1]` int32, where each request's packed rows begin.
        root_row: `[R]` int32, packed row of column 0; `row_start[r + 1]` without candidates.
        logits_start: `[R + 1]` int32, where each request's logits rows begin.
        sampled_rows: `[num_sampled_rows]` int64, logits rows that are sampled.
        max_rows: `[R]` int32, candidates each plan may use.
        num_computed_tokens: `[R]` int32, before the step.
        root_position: `[R]` int64, token index of column 0.
        root_token_ids: `[R]` int64, -1 without candidates.
        token_history: `[max_reqs, L]` int64.
        draft_token_ids: `[max_reqs, K]` int64.
        block_tables: `[R, B]` int64.
        block_size: Slots per block.
        sampling: Sampling parameters by `req_idx`.
        seeds: `[max_reqs]` int64.
        budget: Candidates that bounded this step's rows.
        states: Where the requests' recurrent states are, or None for a target without any.
    """

    shape: StepShape
    req_idx: Tensor
    row_start: Tensor
    root_row: Tensor
    logits_start: Tensor
    sampled_rows: Tensor
    max_rows: Tensor
    num_computed_tokens: Tensor
    root_position: Tensor
    root_token_ids: Tensor
    token_history: Tensor
    draft_token_ids: Tensor
    block_tables: Tensor
    block_size: int
    sampling: SamplingView
    seeds: Tensor
    budget: int
    states: StateTables | None = None

    def plan_view(self) -> PlanView:
        """The step as `plan` sees it."""
        return PlanView(
            req_idx=self.req_idx,
            num_computed_tokens=self.num_computed_tokens,
            root_token_ids=self.root_token_ids,
            max_rows=self.max_rows,
            token_history=self.token_history,
            sampling=self.sampling,
            seeds=self.seeds,
            budget=self.budget,
            draft_token_ids=self.draft_token_ids,
            num_columns=self.shape.num_columns,
        )
