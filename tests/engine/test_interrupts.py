"""Interrupts and exits inside a hook: the engine stops cleanly, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
from plain_reference import PlainReference
from scripted import DEVICE_HOOKS, POLICIES, START_UP_HOOKS, scripted
from test_hook_failures import ASKS, IDS, chain_of, check_stopped

from specround import LLM
from specround.contract import EngineStoppedError, SpeculatorError

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])


def raise_at(call: int, error: BaseException) -> Any:
    """A hook that raises something when it is called for the n-th time."""
    calls = []

    def hook(*_: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return NotImplemented

    return hook


def build(target: PlainReference, late: bool, hook: str, error: BaseException) -> LLM:
    hooks = {hook: raise_at(2, error)}
    if hook == "absorb":
        hooks["candidate_budget"] = lambda *_: 1
    return LLM(target.path, scripted(3, **hooks), async_scheduling=late, max_num_seqs=3)


def end_of(stream: Iterator[Any], outputs: int | None = None) -> BaseException | None:
    """What a stream raises within so many outputs, None = nothing."""
    try:
        list(islice(stream, outputs))
    except (KeyboardInterrupt, EngineStoppedError) as error:
        return error
    return None


@LATE
@pytest.mark.parametrize("hook", [*DEVICE_HOOKS, *POLICIES])
def test_keyboard_interrupt(hook: str, late: bool, target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller as it is; the engine is stopped and empty, and other open streams are told, not left."""
    interrupt = KeyboardInterrupt()
    llm = build(target, late, hook, interrupt)
    steps, step = count(), llm.engine.core.step

    def bounded() -> Any:
        assert next(steps) < 500, "the engine steps for ever"
        return step()

    monkeypatch.setattr(llm.engine.core, "step", bounded)
    streams = [llm.stream(a.as_prompt, a.params, request_ids=[name]) for a, name in zip(ASKS, IDS, strict=True)]
    ends = [end_of(stream, 1) for stream in streams]
    ends = [end or end_of(stream) for end, stream in zip(ends, streams, strict=True)]
    assert [end for end in ends if isinstance(end, KeyboardInterrupt)] == [interrupt]
    assert any(isinstance(end, EngineStoppedError) for end in ends)
    check_stopped(llm)


@LATE
@pytest.mark.parametrize("hook", [*DEVICE_HOOKS, *POLICIES])
def test_system_exit_is_a_failure_of_the_hook(hook: str, late: bool, target: PlainReference) -> None:
    """A speculator cannot end the process: SystemExit becomes a SpeculatorError that names the hook and keeps it."""
    leave = SystemExit(3)
    llm = build(target, late, hook, leave)
    with pytest.raises(SpeculatorError, match=f"{hook} failed: SystemExit") as caught:
        llm.generate([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    assert leave in chain_of(caught.value)
    check_stopped(llm)


@pytest.mark.parametrize("hook", START_UP_HOOKS)
def test_system_exit_at_start_up(hook: str, target: PlainReference) -> None:
    """At start-up too: no engine comes of it, and the process goes on."""
    with pytest.raises(SpeculatorError, match=f"{hook} failed: SystemExit"):
        LLM(target.path, scripted(3, **{hook: raise_at(1, SystemExit(3))}))
