"""`StepClock`: where a step's time goes, measured from outside by wrapping the engine's methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from specround.engine.core import EngineCore

PARTS = ("plan", "lay_out", "forward", "logits", "accept", "commit", "observe", "propose", "schedule", "engine")
"""Parts of a step. `schedule` is the scheduler, `engine` everything else: uploads, downloads, bookkeeping."""
ROUND_PARTS = ("plan", "lay_out", "accept", "commit", "observe")
"""The round outside forward (with its logits) and propose."""


@contextmanager
def replaced(owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method of one object meanwhile.

    Args:
        owner: The object.
        name: The method.
        wrap: Makes the replacement from the bound method.

    Raises:
        AttributeError: The object has no such method.
    """
    own, had_own = vars(owner).get(name), name in vars(owner)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if had_own:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


@dataclass(kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        rows: Rows of the target's forward.
        num_requests: Requests in the step, 0 when it only took requests out.
        is_decode: Every row was a plan's: nothing was prefilled.
        total: Wall time, in seconds.
        seconds: Of each part, in seconds; they add up to `total`.
    """

    rows: int = 0
    num_requests: int = 0
    is_decode: bool = False
    total: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


class StepClock:
    """Times every step of an engine while it is entered. Each moment counts for the innermost part only.

    On a GPU the device is waited for at each boundary, so the steps are slower than they are untimed; a round that is
    replayed as one graph counts as `engine`.

    Args:
        core: The engine's loop.
        wait: Waits for the device; None on a CPU.
        clock: Seconds.

    Example:
        >>> with StepClock(llm.engine.core) as clock:
        ...     llm.generate("1 2 3")
        >>> clock.decode_steps[0].seconds["forward"]
    """

    def __init__(
        self,
        core: EngineCore,
        wait: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps: list[StepRecord] = []
        self._core, self._wait, self._clock = core, wait, clock
        self._current = StepRecord()
        self._inner: list[float] = []
        self._exit = ExitStack()

    @property
    def decode_steps(self) -> list[StepRecord]:
        """Steps that only decoded."""
        return [step for step in self.steps if step.is_decode]

    def __enter__(self) -> StepClock:
        runner, scheduler = self._core.runner, self._core.scheduler
        for name in ("plan", "lay_out", "accept", "commit", "observe", "propose"):
            self._enter(runner.round, name, self._timed(name))
        for name in ("forward", "logits"):
            self._enter(runner.model, name, self._timed(name))
        for name in ("schedule", "note_drafts", "update"):
            self._enter(scheduler, name, self._timed("schedule"))
        self._enter(runner, "execute", self._described)
        self._enter(self._core, "step", self._recorded)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _enter(self, owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._exit.enter_context(replaced(owner, name, wrap))

    def _timed(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **named: Any) -> Any:
                started = self._now()
                self._inner.append(0.0)
                try:
                    return method(*arguments, **named)
                finally:
                    elapsed = self._now() - started
                    self._current.seconds[part] += elapsed - self._inner.pop()
                    if self._inner:
                        self._inner[-1] += elapsed

            return timed

        return wrap

    def _described(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def described(step: Any) -> Any:
            shape, current = step.shape, self._current
            current.rows, current.num_requests = shape.total_rows, shape.num_requests
            current.is_decode = shape.num_requests > 0 and shape.num_rows == shape.num_plan_rows
            return execute(step)

        return described

    def _recorded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("engine")(step)

        def recorded() -> Any:
            self._current = StepRecord()
            try:
                return timed()
            finally:
                self._current.total = sum(self._current.seconds.values())
                self.steps.append(self._current)

        return recorded

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return self._clock()


def time_split(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Figures of some steps: each part's share of the time, and what is left beside the model and drafting."""
    total = sum(step.total for step in steps)
    if not total:
        return {"steps": 0}
    seconds = {part: sum(step.seconds[part] for step in steps) for part in PARTS}
    requests = sum(step.num_requests for step in steps)
    target = seconds["forward"] + seconds["logits"]
    return {
        "steps": len(steps),
        "step_ms": 1e3 * total / len(steps),
        "rows_per_step": sum(step.rows for step in steps) / len(steps),
        "requests_per_step": requests / len(steps),
        "share": {part: seconds[part] / total for part in PARTS},
        "round_overhead_share": sum(seconds[part] for part in ROUND_PARTS) / total,
        "step_overhead_share": (total - target - seconds["propose"]) / total,
        "scheduler_us_per_step": 1e6 * seconds["schedule"] / len(steps),
        "scheduler_us_per_request": 1e6 * seconds["schedule"] / requests,
    }
