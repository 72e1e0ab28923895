"""`Runner`: carries out scheduled steps on the device, one round each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import AcceptResult, BaseSpeculator, HostStep, ProposeView, SpeculatorError, StepObservation
from specround.engine.device_state import DeviceState
from specround.engine.draft_host import EngineDraftHost
from specround.engine.graphs import RoundGraphs, null_step
from specround.engine.kv_cache import KVCache
from specround.engine.messages import LeftRequest, RoundTrace, ScheduledStep, StepResult
from specround.engine.staging import Download, Uploader
from specround.engine.state_cache import StateCache
from specround.models.causal_lm import CausalModel
from specround.round import PlanLayout, RoundBatch, SpecRound, StepShape
from specround.round.acceptance import process_logits
from specround.round.commit import CommittedRows


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundOutcome:
    """What a round left on the device."""

    batch: RoundBatch
    layout: PlanLayout
    result: AcceptResult
    rows: CommittedRows


class StepHandle:
    """A step under way; its counts reach the host with `wait`."""

    def __init__(self, step: ScheduledStep, download: Download, *, with_trace: bool) -> None:
        self.step, self._download, self._with_trace = step, download, with_trace
        self.num_drafts: Sequence[int] | None = None
        """Drafts that stand ready for each request, batch order, where the drafter knows it on the host."""

    def wait(self) -> StepResult:
        """The step's tokens and counts."""
        host = self._download.wait()
        tokens, counts = host[0].tolist(), host[1].tolist()
        committed = tuple(tuple(row[: count[0]]) for row, count in zip(tokens, counts, strict=True))
        traces: tuple[RoundTrace | None, ...] = ()
        if self._with_trace:
            drafts, parents, paths = (tensor.tolist() for tensor in host[2:])
            traces = tuple(
                _trace(drafts[i], parents[i], paths[i], committed[i], counts[i][1]) for i in range(len(committed))
            )
        return StepResult(committed=committed, num_candidates=tuple(count[1] for count in counts), traces=traces)


class Runner:
    """Owns the device side: model, KV, per-request state, and the round.

    Args:
        model: The target, bound to its caches.
        state: Per-request state.
        cache: KV of every layer.
        spec_round: The round.
        states: Recurrent states, or None for a target without any.
        draft_host: Draft layers, or None.
        host_drafting: The speculator drafts on the host.
        wants_hidden: The speculator reads hidden states.
        graphs: Captured rounds, or None.
        record_rounds: Bring trees and paths to the host.
    """

    def __init__(
        self,
        *,
        model: CausalModel,
        state: DeviceState,
        cache: KVCache,
        spec_round: SpecRound,
        states: StateCache | None,
        draft_host: EngineDraftHost | None,
        host_drafting: bool,
        wants_hidden: bool,
        graphs: RoundGraphs | None,
        record_rounds: bool,
    ) -> None:
        self.model, self.state, self.cache, self.round = model, state, cache, spec_round
        self.states = states
        self._draft_host, self._host_drafting, self._wants_hidden = draft_host, host_drafting, wants_hidden
        self._graphs, self._record_rounds = graphs, record_rounds
        self._is_one_segment = not host_drafting and "observe_step" not in spec_round.hooks
        device = state.block_tables.device
        self._uploader = Uploader(device)
        self._arrays = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def speculator(self) -> BaseSpeculator:
        """The speculator; without one, the base class, whose hooks do nothing."""
        return self.round.speculator

    @torch.no_grad()
    def execute(self, step: ScheduledStep) -> StepHandle | None:
        """Run one step; None when it only had requests that leave.

        Raises:
            SpeculatorError: A hook failed or a plan was refused.
        """
        self._change_requests(step)
        self.state.append_blocks(step.blocks, self._uploader)
        if not step.request_ids:
            return None
        padded = None if self._graphs is None else self._graphs.padded(step.shape)
        shape = padded or step.shape
        self.upload_step(step, shape)
        if self._draft_host is not None:
            self._draft_host.max_kv_len = max(shape.kv_bounds) + self.state.draft_token_ids.shape[1] + 1
        budgets, graph_shape = (step.budget, step.next_budget), None
        if self._graphs is not None and padded is not None:
            outcome = self._graphs.run(self, shape, budgets, lambda: self.upload_step(step, shape))
            graph_shape = (shape.num_requests, shape.total_rows)
        else:
            outcome = self.run_round(shape, budgets)
        download = Download(self._host_tensors(outcome, len(step.request_ids)))
        handle = StepHandle(step, download, with_trace=self._record_rounds)
        if not self._is_one_segment:
            self._observe(outcome, step.shape, graph_shape)
            host = _host_step(step, handle.wait()) if self._host_drafting else None
            num_drafts = self._propose(outcome, step.next_budget, host)
            handle.num_drafts = num_drafts if self._host_drafting else None
        return handle

    def run_round(self, shape: StepShape, budgets: tuple[int, int]) -> RoundOutcome:
        """The round on the device, which can be captured: through propose, or through commit if the host is needed.

        Args:
            shape: Of the uploaded step.
            budgets: Candidates that bounded this step, and that the next round may verify.
        """
        batch = self._batch(shape, budgets[0])
        plan = self.round.plan(batch)
        layout = self.round.lay_out(plan, batch)
        hidden = self.model.forward(layout.input_ids, layout.positions, layout.slots, layout.rows, layout.states)
        raw_logits = self.model.logits(hidden.index_select(0, layout.logits_rows))
        result = self.round.accept(layout, process_logits(raw_logits, layout, batch), batch)
        kept_hidden = hidden if self._wants_hidden else None
        rows = self.round.commit(layout, result, batch, self.cache.tensors, kept_hidden)
        self.state.apply(batch.req_idx, _prefix_rows(batch), batch.root_position, result)
        outcome = RoundOutcome(batch=batch, layout=layout, result=result, rows=rows)
        if self._is_one_segment:
            self._propose(outcome, budgets[1], None)
        return outcome

    def _propose(self, outcome: RoundOutcome, budget: int, host: HostStep | None) -> Sequence[int] | None:
        """Let the speculator draft for the next round from what this one left."""
        batch = outcome.batch
        computed = self.state.num_computed_tokens[batch.req_idx]
        committed = outcome.result.num_committed > 0
        history = self.state.token_history
        return self.round.propose(
            ProposeView(
                req_idx=batch.req_idx,
                num_computed_tokens=computed,
                root_token_ids=torch.where(committed, history[batch.req_idx, computed.to(torch.int64)], -1),
                max_rows=batch.max_rows,
                token_history=history,
                sampling=batch.sampling,
                seeds=batch.seeds,
                budget=budget,
                draft_token_ids=self.state.draft_token_ids,
                row_start=batch.row_start,
                root_row=batch.root_row,
                num_rows=batch.shape.num_rows,
                row_req_idx=batch.req_idx[outcome.layout.batch_idx],
                input_ids=outcome.rows.input_ids,
                positions=outcome.rows.positions,
                hidden_states=outcome.rows.hidden_states,
                result=outcome.result,
                any_sampled=batch.shape.num_sampled_rows > 0,
                host=host,
            )
        )

    def _batch(self, shape: StepShape, budget: int) -> RoundBatch:
        """The uploaded step as the round sees it: views of buffers that keep their addresses."""
        count = shape.num_requests
        sizes = [count, count, count, count + 1, count, count + 1, shape.num_sampled_rows]
        parts = torch.split(self._arrays[: sum(sizes)], sizes)
        req_idx, prefix_rows, max_rows, row_start, root_row, logits_start, sampled_rows = parts
        state = self.state
        computed = state.num_computed_tokens[req_idx]
        root_position = computed.to(torch.int64) + prefix_rows
        remaining = (state.limits[req_idx] - root_position - 1).clamp(min=1)
        root = state.token_history[req_idx, root_position.clamp(max=state.token_history.shape[1] - 1)]
        return RoundBatch(
            shape=shape,
            req_idx=req_idx,
            row_start=row_start.to(torch.int32),
            root_row=root_row.to(torch.int32),
            logits_start=logits_start.to(torch.int32),
            sampled_rows=sampled_rows,
            max_rows=torch.minimum(max_rows, remaining).to(torch.int32),
            num_computed_tokens=computed,
            root_position=root_position,
            root_token_ids=torch.where(max_rows > 0, root, -1),
            token_history=state.token_history,
            draft_token_ids=state.draft_token_ids,
            block_tables=state.block_tables[req_idx],
            block_size=state.block_size,
            sampling=state.sampling,
            seeds=state.seeds,
            budget=budget,
            states=None if self.states is None else self.states.tables,
        )

    @property
    def waits_for_results(self) -> bool:
        """Whether a step waits for its own results, because the speculator drafts on the host."""
        return self._host_drafting

    def forget(self, left: LeftRequest) -> None:
        """Empty the slot of a request that left it, and tell the speculator."""
        self.state.leave(left.req_idx)
        if self.states is not None:
            self.states.tables.leave(left.req_idx)
        self._call("request_finished", left.request_id, left.req_idx, left.token_ids)

    def _change_requests(self, step: ScheduledStep) -> None:
        for left in step.left:
            self.forget(left)
        for started in step.started:
            self.state.start(started, self._uploader)
            if self.states is not None:
                self.states.start(started.req_idx, started.state_blocks)
            self._call("request_started", started.request_id, started.req_idx, started.token_ids)

    def _call(self, hook: str, request_id: str, req_idx: int, token_ids: tuple[int, ...]) -> None:
        try:
            getattr(self.speculator, hook)(request_id, req_idx, token_ids)
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            raise SpeculatorError(type(self.speculator).__name__, hook, (), cause) from error

    def upload_null(self, shape: StepShape) -> None:
        """Upload a shape in which every request is the null request: a round on it touches no live state."""
        self.upload_step(null_step(shape, self.state.null_req_idx), shape)

    def upload_step(self, step: ScheduledStep, shape: StepShape) -> None:
        """Upload a step in one copy; requests that pad the shape are the null request with no rows allowed."""
        real, padding = step.shape, shape.num_requests - step.shape.num_requests
        req_idx = [*step.req_idx, *[self.state.null_req_idx] * padding]
        prefix = [rows - plan for rows, plan in zip(shape.num_rows, shape.num_plan_rows, strict=True)]
        max_rows = [*real.num_plan_rows, *[0] * padding]
        row_start, logits_start = _offsets(shape.num_rows), _offsets(shape.num_plan_rows)
        root_row = [row_start[i] + prefix[i] for i in range(shape.num_requests)]
        sampled = []
        if shape.num_sampled_rows == shape.num_logits_rows:
            sampled = list(range(shape.num_logits_rows))
        elif shape.num_sampled_rows:
            for i, is_sampled in enumerate(step.sampled):
                sampled += range(logits_start[i], logits_start[i + 1]) if is_sampled else []
        values = [*req_idx, *prefix, *max_rows, *row_start, *root_row, *logits_start, *sampled]
        if len(values) > self._arrays.shape[0]:
            self._arrays = torch.zeros(2 * len(values), dtype=torch.int64, device=self._arrays.device)
        self._arrays[: len(values)].copy_(self._uploader.upload(values))

    def _observe(self, outcome: RoundOutcome, shape: StepShape, graph_shape: tuple[int, int] | None) -> None:
        if "observe_step" in self.round.hooks and shape.num_logits_rows:
            self.round.observe(
                StepObservation(
                    num_requests=shape.num_requests,
                    num_rows=shape.total_rows,
                    graph_shape=graph_shape,
                    num_candidates=outcome.layout.plan.num_candidates[: shape.num_requests],
                    num_committed=outcome.result.num_committed[: shape.num_requests],
                )
            )

    def _host_tensors(self, outcome: RoundOutcome, count: int) -> list[Tensor]:
        plan, result = outcome.layout.plan, outcome.result
        tensors = [result.token_ids, torch.stack([result.num_committed, plan.num_candidates], 1)]
        if self._record_rounds:
            parents = plan.parents
            if parents is None:
                parents = (torch.arange(plan.num_columns, device=result.path.device) - 1).expand_as(result.path)
            tensors += [plan.token_ids, parents, result.path]
        return [tensor[:count] for tensor in tensors]


def _prefix_rows(batch: RoundBatch) -> Tensor:
    return (batch.root_row - batch.row_start[:-1]).to(torch.int64)


def _offsets(counts: tuple[int, ...]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def _host_step(step: ScheduledStep, result: StepResult) -> HostStep:
    return HostStep(
        request_ids=step.request_ids,
        req_idx=step.req_idx,
        committed=result.committed,
        max_drafts=step.next_max_drafts,
    )


def _trace(
    drafts: list[int], parents: list[int], path: list[int], committed: tuple[int, ...], num_candidates: int
) -> RoundTrace | None:
    if num_candidates == 0:
        return None
    return RoundTrace(
        token_ids=tuple(drafts[:num_candidates]),
        parents=tuple(parents[:num_candidates]),
        path=tuple(path[: len(committed)]),
        committed=committed,
    )
