"""`Scheduler`: continuous batching on the host: admission, chunked prefill, blocks, preemption, budgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specround.contract import BudgetView, RequestError, SpeculatorConfig, SpeculatorError, overrides
from specround.engine.block_pool import BlockPool
from specround.engine.messages import (
    BlockUpdate,
    LeftRequest,
    NewRequest,
    RequestUpdate,
    ScheduledStep,
    StartedRequest,
    StepResult,
)
from specround.engine.request import Request, Status
from specround.engine.state_pool import StatePool
from specround.round import StepShape


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What bounds a step.

    Attributes:
        max_num_seqs: Requests running at once.
        max_num_batched_tokens: Rows of one step.
        block_size: Tokens per block.
        lookahead: K as declared; slots for so many drafts are reserved on every step.
        max_candidates: Effective candidates per request.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    lookahead: int
    max_candidates: int


@dataclass
class _Pass:
    """One scheduling pass while it is put together."""

    room: int
    requests: list[Request] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    num_plan_rows: list[int] = field(default_factory=list)
    kv_bounds: list[int] = field(default_factory=list)
    started: list[StartedRequest] = field(default_factory=list)
    blocks: list[BlockUpdate] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """First come, first served, with preemption by recompute.

    The scheduler never waits for counts: it schedules with bounds, reserves blocks for the upper one and returns the
    surplus when the counts arrive.

    Args:
        limits: What bounds a step.
        pool: The KV blocks.
        config: The speculator's policies, or None for plain decoding.
        states: The recurrent state blocks, or None for a target without recurrent layers.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        config: SpeculatorConfig | None,
        states: StatePool | None = None,
    ) -> None:
        self.limits, self.pool, self.states, self._config = limits, pool, states, config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_trimmed_drafts = 0
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._free_slots = deque(range(limits.max_num_seqs))
        self._left: list[LeftRequest] = []
        self._in_flight: dict[int, list[Request]] = {}
        self._step = 0
        self._budget = 1
        self._asks_admission = config is not None and overrides(config, SpeculatorConfig, "admit_limit")

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Running and waiting requests."""
        return tuple(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or requests that left and whose speculator was not told yet."""
        return bool(self._requests or self._left)

    def add(self, new: NewRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: The id belongs to an unfinished request.
        """
        if new.request_id in self._requests:
            raise RequestError("request_id", new.request_id, "unique among unfinished requests")
        request = Request(new=new, token_ids=list(new.prompt_token_ids))
        self._requests[new.request_id] = request
        self.waiting.append(request)

    def abort(self, request_ids: Iterable[str], kept: Mapping[str, int] | None = None) -> list[str]:
        """Finish requests now, whatever they are doing; unknown ids are ignored.

        Args:
            request_ids: The requests.
            kept: Output tokens that were kept, by id; None or no entry = all that were delivered.

        Returns:
            The ids that were alive.
        """
        alive = [request_id for request_id in request_ids if request_id in self._requests]
        for request_id in alive:
            request = self._requests[request_id]
            if kept is not None and request_id in kept:
                del request.token_ids[len(request.new.prompt_token_ids) + kept[request_id] :]
            self._finish(request)
        return alive

    def take_left(self) -> list[LeftRequest]:
        """Requests that left their slot and that no step will report, because there is none to come."""
        left, self._left = self._left, []
        return left

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when no request can run before results arrive."""
        current = _Pass(room=self.limits.max_num_batched_tokens)
        running = tuple(self.running)
        for place, request in enumerate(running):
            if request.status is Status.RUNNING:
                self._schedule_running(request, current, later=len(running) - place - 1)
        self._admit(current)
        if not current.requests and not self._left:
            return None
        return self._finish_pass(current)

    def note_drafts(self, step: ScheduledStep, num_drafts: Sequence[int]) -> None:
        """Learn how many drafts really stand ready after a step, batch order, so that no row waits for more."""
        for request, count in zip(self._in_flight[step.step], num_drafts, strict=True):
            request.num_draft_rows = min(request.num_draft_rows, count)

    def update(self, step: ScheduledStep, result: StepResult) -> list[RequestUpdate]:
        """Take in a step's counts: deliver tokens, finish requests, return surplus blocks."""
        updates = []
        for i, request in enumerate(self._in_flight.pop(step.step)):
            if request.status is Status.FINISHED or step.shape.num_plan_rows[i] == 0:
                continue
            request.in_flight.popleft()
            kept, finish, stop = request.deliver(result.committed[i])
            if finish is not None:
                self._finish(request)
            elif request.status is Status.RUNNING:
                self._return_surplus(request)
            trace = result.traces[i] if result.traces else None
            updates.append(
                RequestUpdate(
                    request_id=request.request_id,
                    new_token_ids=kept,
                    finish_reason=finish,
                    stop_reason=stop,
                    drafted=result.num_candidates[i] - 1,
                    accepted=min(len(kept), len(result.committed[i]) - 1),
                    trace=None if trace is None else trace.cut(len(kept)),
                )
            )
        return updates

    def stop(self) -> tuple[str, ...]:
        """Drop every request and return its blocks; the ids that were alive."""
        return tuple(self.abort(self.request_ids))

    def _schedule_running(self, request: Request, current: _Pass, later: int) -> None:
        """Give a request its rows, and leave one for each of the `later` ones."""
        rows = self._wanted_rows(request, min(current.room, max(1, current.room - later)))
        if rows == 0:
            return
        while not self._reserve(request, rows, current):
            victim = self._pick_victim(current)
            self._preempt(victim)
            current.preempted = True
            if victim is request:
                return
        self._append(request, rows, current)

    def _pick_victim(self, current: _Pass) -> Request:
        """The last running request that is not part of this step yet; there is one, as the asking one is not."""
        return next(request for request in reversed(self.running) if request not in current.requests)

    def _wanted_rows(self, request: Request, room: int) -> int:
        if request.is_prefilling:
            return min(request.prefill_end - request.num_prefilled, room)
        remaining = request.limit - request.min_tokens
        if remaining <= 0 or room == 0:
            return 0
        wanted = 1 + request.num_draft_rows
        rows = min(wanted, remaining, room)
        self.num_trimmed_drafts += wanted - rows
        return rows

    def _reserve(self, request: Request, rows: int, current: _Pass) -> bool:
        """Hold blocks for the step's rows and for the drafts that follow it."""
        end = rows + (request.num_prefilled if request.is_prefilling else request.max_tokens - 1)
        tokens = min(end + 1 + self.limits.lookahead, request.limit)
        missing = -(-tokens // self.limits.block_size) - len(request.blocks)
        if missing <= 0:
            return True
        taken = self.pool.allocate(missing)
        if taken is None:
            return False
        current.blocks.append(BlockUpdate(req_idx=request.req_idx, start=len(request.blocks), block_ids=taken))
        request.blocks.extend(taken)
        return True

    def _append(self, request: Request, rows: int, current: _Pass) -> None:
        if request.is_prefilling:
            end = request.num_prefilled + rows
            plan_rows = 1 if end == request.prefill_end else 0
            request.num_prefilled, bound = end, end
        else:
            plan_rows, bound = rows, min(request.max_tokens - 1 + rows, request.limit)
        if plan_rows:
            request.in_flight.append(plan_rows)
        current.room -= rows
        current.requests.append(request)
        current.num_rows.append(rows)
        current.num_plan_rows.append(plan_rows)
        current.kv_bounds.append(bound)

    def _admit(self, current: _Pass) -> None:
        if not self.waiting:
            return
        limit = self.limits.max_num_seqs
        if self._asks_admission:
            limit = min(limit, self._ask_admit_limit())
        while self.waiting and not current.preempted and len(self.running) < limit and current.room > 0:
            request = self.waiting[0]
            if not self._start(request, current):
                return
            self.waiting.popleft()
            self._free_slots.popleft()
            self.running.append(request)
            current.started.append(_started(request))
            self._append(request, min(request.prefill_end, current.room), current)

    def _start(self, request: Request, current: _Pass) -> bool:
        """Hold a waiting request's blocks for its first rows, of KV and of states; all of them or none."""
        request.start(self._free_slots[0])
        spans = () if self.states is None else self.states.allocate()
        if spans is not None:
            request.state_blocks = spans
            if self._reserve(request, min(request.prefill_end, current.room), current):
                return True
            self._free_states(request)
        request.leave(Status.WAITING)
        return False

    def _free_states(self, request: Request) -> None:
        if self.states is not None:
            self.states.free(request.state_blocks)
            request.state_blocks = ()

    def _ask_admit_limit(self) -> int:
        limit = self._ask("admit_limit")
        return self.limits.max_num_seqs if limit is None else limit

    def _finish_pass(self, current: _Pass) -> ScheduledStep:
        bound = self._budget
        if current.requests:
            self._budget = self._ask_budget()
        budget = self._budget
        for request, plan_rows in zip(current.requests, current.num_plan_rows, strict=True):
            if plan_rows:
                request.num_draft_rows = budget - 1
        order = sorted(range(len(current.requests)), key=lambda i: current.num_rows[i])
        requests = [current.requests[i] for i in order]
        step = ScheduledStep(
            step=self._step,
            request_ids=tuple(request.request_id for request in requests),
            req_idx=tuple(request.req_idx for request in requests),
            shape=StepShape(
                num_rows=tuple(current.num_rows[i] for i in order),
                num_plan_rows=tuple(current.num_plan_rows[i] for i in order),
                kv_bounds=tuple(current.kv_bounds[i] for i in order),
                num_sampled_rows=sum(
                    current.num_plan_rows[i] for i in order if current.requests[i].new.temperature > 0
                ),
            ),
            sampled=tuple(request.new.temperature > 0 for request in requests),
            budget=bound,
            next_budget=budget,
            next_max_drafts=tuple(min(budget - 1, max(0, r.limit - r.min_tokens - 1)) for r in requests),
            started=tuple(current.started),
            left=tuple(self._left),
            blocks=tuple(current.blocks),
        )
        self._left = []
        if requests:
            self._in_flight[self._step] = requests
        self._step += 1
        return step

    def _ask_budget(self) -> int:
        if self._config is None:
            return 1
        budget = self._ask("candidate_budget")
        assert budget is not None
        return min(budget, self.limits.max_candidates)

    def _ask(self, policy: str) -> int | None:
        """Call one of the speculator's policies and check its answer."""
        assert self._config is not None
        name = type(self._config).__name__
        try:
            answer = getattr(self._config, policy)(self._view(self._config))
        except (Exception, SystemExit) as error:
            raise SpeculatorError(name, policy, (), f"{type(error).__name__}: {error}") from error
        if answer is None and policy == "admit_limit":
            return None
        if not isinstance(answer, int) or isinstance(answer, bool) or answer < 1:
            raise SpeculatorError(name, policy, (), f"it returned {answer!r}: must be an integer >= 1")
        return answer

    def _view(self, config: SpeculatorConfig) -> BudgetView:
        return BudgetView(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.pool.num_free,
            num_total_blocks=self.pool.num_total,
            block_size=self.limits.block_size,
            num_spec_blocks_held=0 if self.states is None else self.states.num_draft_blocks_held,
            num_speculative_tokens=config.num_speculative_tokens,
            max_candidates=self.limits.max_candidates,
            step=self._step,
        )

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._leave(request, Status.WAITING)
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._leave(request, Status.FINISHED)
        else:
            self.waiting.remove(request)
            request.status = Status.FINISHED
        del self._requests[request.request_id]

    def _leave(self, request: Request, status: Status) -> None:
        self.running.remove(request)
        self.pool.free(request.blocks)
        self._free_states(request)
        self._free_slots.append(request.req_idx)
        token_ids = tuple(request.token_ids)
        self._left.append(LeftRequest(request_id=request.request_id, req_idx=request.req_idx, token_ids=token_ids))
        request.leave(status)

    def _return_surplus(self, request: Request) -> None:
        if request.is_prefilling:
            return
        tokens = min(request.max_tokens + self.limits.lookahead, request.limit)
        keep = -(-tokens // self.limits.block_size)
        if keep < len(request.blocks):
            self.pool.free(request.blocks[keep:])
            del request.blocks[keep:]


def _started(request: Request) -> StartedRequest:
    return StartedRequest(
        request_id=request.request_id,
        req_idx=request.req_idx,
        token_ids=tuple(request.token_ids),
        temperature=request.new.temperature,
        seed=request.new.seed,
        limit=request.limit,
        state_blocks=request.state_blocks,
    )
