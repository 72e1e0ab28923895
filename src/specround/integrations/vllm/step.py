"""`RoundSteps`: carries the round through vLLM's step: planned before the forward, accepted by the sampler, committed.

Needs no vLLM: the runner hands over tensors and host values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import AcceptResult, HostStep, ProposeView, SpeculatorError, StepObservation, VerifyOutput
from specround.integrations.vllm.batch import StepRequests, make_batch, plan_logits, upload
from specround.integrations.vllm.requests import RequestTable
from specround.round import PlanLayout, RoundBatch, SpecRound
from specround.round.commit import CommittedRows


@dataclass(eq=False, kw_only=True)
class Step:
    """A step under way.

    Attributes:
        requests: What vLLM scheduled.
        batch: The round's view of it.
        layout: The plan's rows.
        result: What was accepted, once it was.
        rows: Its rows after commit, once it was committed.
    """

    requests: StepRequests
    batch: RoundBatch
    layout: PlanLayout
    result: AcceptResult | None = None
    rows: CommittedRows | None = None


class RoundSteps:
    """One round after the other.

    Args:
        spec_round: The round.
        table: The requests' rows.
        wants_hidden: The speculator reads hidden states.
        host_drafting: The speculator drafts on the host.
    """

    def __init__(self, spec_round: SpecRound, table: RequestTable, *, wants_hidden: bool, host_drafting: bool) -> None:
        self.round, self.table = spec_round, table
        self._wants_hidden, self._host_drafting = wants_hidden, host_drafting
        self._budget = 1
        self.num_drafts: dict[str, int] = {}
        """Drafts that stand ready for each request of the last step."""
        self.current: Step | None = None

    def start(self, request_id: str, req_idx: int, token_ids: list[int], limit: int) -> None:
        """A request starts, or resumes after preemption."""
        self.table.start(request_id, req_idx, token_ids, limit)
        self._call("request_started", request_id, req_idx, tuple(token_ids))

    def forget(self, request_id: str, num_kept: int | None) -> None:
        """A request leaves its slot.

        Args:
            request_id: The request; an unknown one is ignored.
            num_kept: Tokens it kept, prompt included; None = unknown, for a request that is replaced.
        """
        req_idx = self.table.forget(request_id)
        self.num_drafts.pop(request_id, None)
        if req_idx is not None:
            tokens = self.table.token_history[req_idx, : num_kept or 0].tolist()
            self._call("request_finished", request_id, req_idx, tuple(tokens))

    def plan(self, requests: StepRequests, block_table: Tensor, block_size: int) -> Step:
        """Plan and lay out a step.

        Args:
            requests: What vLLM scheduled.
            block_table: `[R, B]`.
            block_size: Slots per block.
        """
        effective = self.round.resources.max_candidates
        batch = make_batch(requests, self.table, block_table, block_size, self._budget, effective)
        self.table.max_kv_len = max(batch.shape.kv_bounds) + self.table.draft_token_ids.shape[1] + 1
        with self._naming(requests):
            plan = self.round.plan(batch)
        self.current = Step(requests=requests, batch=batch, layout=self.round.lay_out(plan, batch))
        return self.current

    def accept(self, logits: Tensor, processed: Tensor) -> tuple[Tensor, Tensor]:
        """Accept a step's rows.

        Args:
            logits: `[N, V]` of vLLM's logits rows, before sampling parameters.
            processed: `[N, V]`, after them.

        Returns:
            Committed tokens `[R, C]`, 0 = unused, and their number `[R]`; 1 for a prefill that does not end, whose
            token vLLM drops.
        """
        step = self._step()
        chosen = upload(plan_logits(step.requests), logits.device)
        batch = step.batch
        output = VerifyOutput(
            logits=processed.index_select(0, chosen).float(),
            raw_logits=logits.index_select(0, chosen),
            row_start=batch.logits_start,
            root_row=batch.logits_start[:-1],
            num_computed_tokens=batch.root_position.to(torch.int32),
            req_idx=batch.req_idx,
            sampling=batch.sampling,
            seeds=batch.seeds,
        )
        with self._naming(step.requests):
            step.result = self.round.accept(step.layout, output, batch)
        return step.result.token_ids.clamp(min=0), step.result.num_committed.clamp(min=1)

    def commit(self, caches: Sequence[Tensor], hidden_states: Tensor) -> None:
        """Make caches and rows what a chain would have left, and append the tokens to the history."""
        step = self._step()
        assert step.result is not None
        hidden = hidden_states[: step.batch.shape.total_rows] if self._wants_hidden else None
        step.rows = self.round.commit(step.layout, step.result, step.batch, caches, hidden)
        self.table.apply(step.batch.req_idx, step.batch.root_position, step.result)

    def observe(self) -> None:
        """Tell the speculator about the step, if it listens."""
        step = self._step()
        assert step.result is not None
        shape = step.batch.shape
        if "observe_step" in self.round.hooks and shape.num_logits_rows:
            observation = StepObservation(
                num_requests=shape.num_requests,
                num_rows=shape.total_rows,
                graph_shape=None,
                num_candidates=step.layout.plan.num_candidates,
                num_committed=step.result.num_committed,
            )
            with self._naming(step.requests):
                self.round.observe(observation)

    def propose(self, num_drafts: int) -> Tensor:
        """Draft for the next round; ends the step.

        Args:
            num_drafts: Drafts the next round may verify per request.

        Returns:
            `[R, K]` int64, the draft buffer; a speculator that plans on its own leaves it at -1.
        """
        step, self.current = self._step(), None
        batch, result, rows = step.batch, step.result, step.rows
        assert result is not None
        assert rows is not None
        self._budget = min(num_drafts + 1, self.round.resources.max_candidates)
        committed = result.num_committed > 0
        prefix = (batch.root_row - batch.row_start[:-1]).to(torch.int64)
        computed = batch.num_computed_tokens.to(torch.int64) + prefix + result.num_committed
        history = self.table.token_history
        view = ProposeView(
            req_idx=batch.req_idx,
            num_computed_tokens=computed.to(torch.int32),
            root_token_ids=torch.where(committed, history[batch.req_idx, computed], -1),
            max_rows=batch.max_rows,
            token_history=history,
            sampling=batch.sampling,
            seeds=batch.seeds,
            budget=self._budget,
            draft_token_ids=self.table.draft_token_ids,
            row_start=batch.row_start,
            root_row=batch.root_row,
            num_rows=batch.shape.num_rows,
            row_req_idx=batch.req_idx[step.layout.batch_idx],
            input_ids=rows.input_ids,
            positions=rows.positions,
            hidden_states=rows.hidden_states,
            result=result,
            any_sampled=batch.shape.num_sampled_rows > 0,
            host=self._host_step(step, result) if self._host_drafting else None,
        )
        with self._naming(step.requests):
            ready = self.round.propose(view)
        counts = ready if ready is not None else [self._budget - 1] * batch.shape.num_requests
        plain = self.table.plain
        for request_id, count in zip(step.requests.request_ids, counts, strict=True):
            self.num_drafts[request_id] = 0 if request_id in plain else min(count, self._budget - 1)
        return self.table.draft_token_ids[batch.req_idx]

    def _host_step(self, step: Step, result: AcceptResult) -> HostStep:
        requests, table = step.requests, self.table
        found = torch.cat([result.num_committed[:, None].to(result.token_ids.dtype), result.token_ids], 1).tolist()
        committed = tuple(tuple(row[1 : 1 + row[0]]) for row in found)
        drafts = []
        for request_id, req_idx, root in zip(requests.request_ids, requests.req_idx, requests.roots, strict=True):
            room = min(max(table.limits_cpu[req_idx] - root - 3, 0), self._budget - 1)
            drafts.append(0 if request_id in table.plain else room)
        return HostStep(
            request_ids=requests.request_ids,
            req_idx=requests.req_idx,
            committed=committed,
            max_drafts=tuple(drafts),
        )

    def _step(self) -> Step:
        if self.current is None:
            raise RuntimeError("no step was planned: vLLM sampled rows that it had not prepared")
        return self.current

    def _call(self, hook: str, request_id: str, req_idx: int, token_ids: tuple[int, ...]) -> None:
        speculator = self.round.speculator
        try:
            getattr(speculator, hook)(request_id, req_idx, token_ids)
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            failed = (*self.table.request_ids,)
            raise SpeculatorError(type(speculator).__name__, hook, failed, cause) from error

    @contextmanager
    def _naming(self, requests: StepRequests) -> Iterator[None]:
        """Name the requests when a hook fails: vLLM's engine stops with all that are running."""
        try:
            yield
        except SpeculatorError as error:
            raise error.naming(self.table.request_ids, requests.request_ids) from error
