"""A scheduler without a model: steps get invented results, and a book keeps what must hold."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from specround.contract import BudgetView, SpeculatorConfig
from specround.engine.block_pool import BlockPool
from specround.engine.messages import NewRequest, RequestUpdate, ScheduledStep, StepResult
from specround.engine.request import Request
from specround.engine.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, kw_only=True)
class Whims(SpeculatorConfig):
    """Random budgets and admission limits, or scripted budgets; remembers what it was shown."""

    random: random.Random = field(default_factory=random.Random)
    script: list[int] = field(default_factory=list)
    seen: list[tuple[str, BudgetView]] = field(default_factory=list)

    def candidate_budget(self, view: BudgetView) -> int:
        self.seen.append(("candidate_budget", view))
        if self.script:
            return self.script.pop(0)
        return self.random.choice((1, 1, 2, self.num_speculative_tokens + 1, 99))

    def admit_limit(self, view: BudgetView) -> int | None:
        self.seen.append(("admit_limit", view))
        return None if self.script else self.random.choice((None, 1, 2, 50))


@dataclass(frozen=True)
class Settings:
    """One scheduler."""

    drafts: int
    block_size: int
    extra_blocks: int
    num_seqs: int
    batched_tokens: int
    late: bool
    max_model_len: int = 24


class SchedulerBook:
    """Drives a scheduler, checks every step, and remembers what each request got.

    Token values tell their owner: the n-th token of the k-th request added is `1000 * k + n`.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.random = settings, random.Random(seed)
        blocks = -(-settings.max_model_len // settings.block_size) + settings.extra_blocks
        self.pool = BlockPool(blocks)
        self.config = Whims(num_speculative_tokens=settings.drafts, random=random.Random(seed + 1))
        limits = SchedulerLimits(
            max_num_seqs=settings.num_seqs,
            max_num_batched_tokens=max(settings.batched_tokens, settings.num_seqs),
            block_size=settings.block_size,
            lookahead=settings.drafts,
            max_candidates=settings.drafts + 1,
        )
        self.scheduler = Scheduler(limits, self.pool, self.config)
        self.steps: deque[tuple[ScheduledStep, list[Request], list[int]]] = deque()
        self.numbers: dict[Request, int] = {}
        self.got: dict[Request, list[int]] = {}
        self.true_count: dict[Request, int] = {}
        self.prefilled: dict[Request, int] = {}
        self.prefill_end: dict[Request, int] = {}
        self.finished: list[Request] = []
        self.aborted: list[Request] = []
        self.slot_owner: dict[int, str] = {}
        self.bound = 1
        self.log: list[ScheduledStep] = []

    def add(self, request_id: str, prompt: int, max_tokens: int, stop_at: int | None) -> None:
        """Queue a request that may stop at its n-th generated token."""
        number = len(self.numbers) + 1
        stop = frozenset() if stop_at is None else frozenset({1000 * number + prompt + stop_at})
        ids = tuple(1000 * number + i for i in range(prompt))
        self.scheduler.add(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=ids,
                temperature=0.0,
                seed=0,
                max_tokens=min(max_tokens, self.settings.max_model_len - prompt),
                stop_token_ids=stop,
            )
        )
        request = self.scheduler._requests[request_id]
        self.numbers[request], self.got[request] = number, []

    def abort(self, request_id: str) -> None:
        """Abort a live request."""
        request = self.scheduler._requests[request_id]
        assert self.scheduler.abort([request_id, "nobody"]) == [request_id]
        self.aborted.append(request)
        self.check_pool()

    def step(self) -> bool:
        """One pass of the engine's loop; false when there was nothing to do."""
        waiting = list(self.scheduler.waiting)
        asked = len(self.config.seen)
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step, waiting, self.config.seen[asked:])
            if step.request_ids:
                self._execute(step)
        self.check_pool()
        depth = 1 if self.settings.late and step is not None and step.request_ids else 0
        while len(self.steps) > depth:
            self._deliver(*self.steps.popleft())
        self.check_pool()
        return step is not None or bool(self.steps)

    def check_pool(self) -> None:
        """Blocks belong to one request each, and none is lost."""
        held = [block for request in self.scheduler.running for block in request.blocks]
        assert len(held) == len(set(held)), "a block has two owners"
        assert len(held) + self.pool.num_free == self.pool.num_total, "a block has no owner"
        assert 0 not in held
        assert len(self.scheduler.running) <= self.settings.num_seqs
        slots = [request.req_idx for request in self.scheduler.running]
        assert sorted([*slots, *self.scheduler._free_slots]) == list(range(self.settings.num_seqs))
        assert not any(request.blocks for request in self.scheduler.waiting)

    def _check_step(self, step: ScheduledStep, waiting: list[Request], asked: list[tuple[str, BudgetView]]) -> None:
        shape, limits = step.shape, self.scheduler.limits
        assert shape.total_rows <= limits.max_num_batched_tokens, "the token budget was exceeded"
        assert len(set(step.request_ids)) == len(step.request_ids) <= limits.max_num_seqs
        names = [name for name, _ in asked]
        assert names.count("candidate_budget") == (1 if step.request_ids else 0), "asked once per step that runs"
        assert names.count("admit_limit") <= 1
        assert not names.count("admit_limit") or names.index("admit_limit") == 0
        assert step.budget == self.bound
        assert max((rows for rows in shape.num_plan_rows), default=1) <= self.bound, "the budget was exceeded"
        self.bound = step.next_budget
        self.log.append(step)
        started = [item.request_id for item in step.started]
        expected = [request.request_id for request in waiting][: len(started)]
        assert started == expected, "admission is first come, first served"
        for left in step.left:
            assert self.slot_owner.pop(left.req_idx) == left.request_id
        for item in step.started:
            assert item.req_idx not in self.slot_owner, "a slot has two owners"
            self.slot_owner[item.req_idx] = item.request_id
            request = self.scheduler._requests[item.request_id]
            assert item.token_ids == tuple(request.token_ids), "everything known is prefilled again"
            self.true_count[request] = self.prefill_end[request] = len(item.token_ids)
            self.prefilled[request] = 0
        for request_id, req_idx in zip(step.request_ids, step.req_idx, strict=True):
            assert self.slot_owner[req_idx] == request_id

    def _execute(self, step: ScheduledStep) -> None:
        """Invent a result, as the device would: it knows true counts, and cuts rows at the request's limit."""
        requests = [self.scheduler._requests[request_id] for request_id in step.request_ids]
        counts = []
        for request, rows, plan_rows, bound, drafts in zip(
            requests,
            step.shape.num_rows,
            step.shape.num_plan_rows,
            step.shape.kv_bounds,
            step.next_max_drafts,
            strict=True,
        ):
            have = self.true_count[request]
            slots = len(request.blocks) * self.settings.block_size
            if self.prefilled[request] < self.prefill_end[request]:
                self.prefilled[request] += rows
                assert self.prefilled[request] <= self.prefill_end[request]
                assert plan_rows == (1 if self.prefilled[request] == self.prefill_end[request] else 0)
            else:
                assert plan_rows == rows >= 1
            root = have - 1 if plan_rows else self.prefilled[request]
            assert bound >= root + plan_rows or bound == request.limit
            assert slots >= min(root + plan_rows, request.limit), "rows without blocks"
            if plan_rows == 0:
                counts.append(0)
                continue
            assert self.settings.late or plan_rows <= request.limit - have, "rows that could not be kept"
            most = max(1, min(plan_rows, request.limit - have))
            count = self.random.randint(1, most)
            counts.append(count)
            self.true_count[request] = have + count
            ahead = min(have + count + self.settings.drafts, request.limit)
            assert slots >= ahead, "drafts of the next round without blocks"
            assert self.settings.late or drafts <= max(0, request.limit - have - 1)
        self.steps.append((step, requests, counts))

    def _deliver(self, step: ScheduledStep, requests: list[Request], counts: list[int]) -> None:
        committed = []
        for request, count in zip(requests, counts, strict=True):
            last = len(request.token_ids)
            committed.append(tuple(1000 * self.numbers[request] + last + i for i in range(count)))
        result = StepResult(committed=tuple(committed), num_candidates=step.shape.num_plan_rows)
        alive = dict(self.scheduler._requests)
        updates = self.scheduler.update(step, result)
        for update in updates:
            request = alive[update.request_id]
            assert request in requests, "an update for a request that was not in the step"
            self._take(request, update)
            if request.blocks and not request.is_prefilling:
                needed = min(request.max_tokens + self.settings.drafts, request.limit)
                assert len(request.blocks) == -(-needed // self.settings.block_size), "surplus blocks were kept"

    def _take(self, request: Request, update: RequestUpdate) -> None:
        number = self.numbers[request]
        assert all(token // 1000 == number for token in update.new_token_ids), "tokens of another request"
        assert 0 <= update.accepted <= min(update.drafted, len(update.new_token_ids))
        self.got[request] += update.new_token_ids
        if update.finish_reason is not None:
            self.finished.append(request)
