"""`EngineCore`: the loop: schedule a step, run it, take in results, at once or one step late."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping

from specround.contract import EngineStoppedError, RoundStats, SpeculatorConfig, SpeculatorError, overrides
from specround.engine.messages import NewRequest, RequestUpdate
from specround.engine.runner import Runner, StepHandle
from specround.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runner. It exchanges plain messages with its front end, so it can live in another process.

    Args:
        scheduler: The host side.
        runner: The device side.
        config: The speculator's policies, or None.
        async_scheduling: Take in a step's results only after the next step is under way.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, config: SpeculatorConfig | None, *, async_scheduling: bool
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self._depth = 1 if async_scheduling else 0
        self._in_flight: deque[StepHandle] = deque()
        self._config = config if config is not None and overrides(config, SpeculatorConfig, "round_finished") else None
        self._failure: BaseException | None = None
        self._last_result = time.perf_counter()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do; a stopped engine has nothing."""
        return self._failure is None and (bool(self._in_flight) or self.scheduler.has_work)

    def add(self, request: NewRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: Duplicate id.
            EngineStoppedError: An earlier failure or `shutdown` stopped the engine.
        """
        self._check_alive()
        self.scheduler.add(request)

    @property
    def overlaps(self) -> bool:
        """Whether the host schedules a step while the device still runs the one before."""
        return self._depth > 0 and not self.runner.waits_for_results

    def abort(self, request_ids: Iterable[str], kept: Mapping[str, int] | None = None) -> list[RequestUpdate]:
        """Finish requests now; unknown ids are ignored.

        Args:
            request_ids: The requests.
            kept: Output tokens that were kept, by id, where that is fewer than were delivered (after a stop string).
        """
        alive = self.scheduler.abort(request_ids, kept)
        return [RequestUpdate(request_id=name, new_token_ids=(), finish_reason="abort") for name in alive]

    def step(self) -> list[RequestUpdate]:
        """Advance by one step.

        Raises:
            SpeculatorError: A hook failed; every request failed with it and the engine is stopped.
            EngineStoppedError: It was stopped before.
        """
        self._check_alive()
        scheduled = None
        if not self._in_flight:
            self._last_result = time.perf_counter()
        try:
            scheduled = self.scheduler.schedule()
            handle = None if scheduled is None else self.runner.execute(scheduled)
            if handle is not None:
                self._in_flight.append(handle)
                if handle.num_drafts is not None:
                    self.scheduler.note_drafts(handle.step, handle.num_drafts)
            depth = self._depth if handle is not None else 0
            updates = []
            while len(self._in_flight) > depth:
                updates += self._take_in(self._in_flight.popleft())
            return updates
        except SpeculatorError as error:
            batch = () if scheduled is None else scheduled.request_ids
            raise error.naming(self._stop(error), batch) from error
        except BaseException as error:  # an interrupt too: what it cut short cannot be resumed
            self._stop(error)
            raise

    def shutdown(self) -> None:
        """Drop all requests and refuse new ones."""
        if self._failure is None:
            self._stop(EngineStoppedError("the engine was shut down"))

    def _take_in(self, handle: StepHandle) -> list[RequestUpdate]:
        result = handle.wait()
        now = time.perf_counter()
        for i, tokens in enumerate(result.committed):
            if handle.step.shape.num_plan_rows[i] and not tokens:
                cause = (
                    f"request {handle.step.request_ids[i]!r} committed no token: its plan was changed after the check"
                )
                raise SpeculatorError(type(self.runner.speculator).__name__, "accept", (), cause)
        if self._config is not None:
            stats = RoundStats(
                step=handle.step.step,
                seconds=now - self._last_result,
                num_candidates=result.num_candidates,
                num_committed=tuple(len(tokens) for tokens in result.committed),
            )
            try:
                self._config.round_finished(stats)
            except (Exception, SystemExit) as error:
                cause = f"{type(error).__name__}: {error}"
                raise SpeculatorError(type(self._config).__name__, "round_finished", (), cause) from error
        self._last_result = now
        return self.scheduler.update(handle.step, result)

    def _stop(self, failure: BaseException) -> tuple[str, ...]:
        self._failure = failure
        self._in_flight.clear()
        failed = self.scheduler.stop()
        for left in self.scheduler.take_left():
            try:
                self.runner.forget(left)
            except SpeculatorError as error:
                logger.error("while stopping: %s", error)
        return failed

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"the engine is stopped: {self._failure}")
