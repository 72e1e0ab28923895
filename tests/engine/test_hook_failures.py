"""A hook that raises, or a policy that answers nonsense, fails every request by name and stops the engine cleanly."""

from __future__ import annotations

from typing import Any

import pytest
from plain_reference import Ask, PlainReference
from scripted import DEVICE_HOOKS, POLICIES, START_UP_HOOKS, scripted

from specround import LLM
from specround.contract import CapabilityError, ConfigError, EngineStoppedError, SpeculatorError

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
ASKS = [Ask((3 + n, 4), 12) for n in range(5)]
IDS = [f"request-{n}" for n in range(5)]


class FaultError(Exception):
    """Raised by hooks under test."""


def fail_at(call: int) -> Any:
    """A hook that raises when it is called for the n-th time, and else lets the default happen."""
    calls = []

    def hook(*_: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise FaultError("out of luck")
        return NotImplemented

    return hook


def chain_of(error: BaseException) -> list[BaseException]:
    """An exception and its causes."""
    return [error] if error.__cause__ is None else [error, *chain_of(error.__cause__)]


def check_stopped(llm: LLM) -> None:
    """Everything is returned, nothing is accepted any more, and shutting down works, twice."""
    core = llm.engine.core
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_total, "blocks leaked"
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    assert not core.scheduler.request_ids
    assert not llm._inboxes
    assert not core.has_work
    assert not core._in_flight, "results are kept that nobody will read"
    for _ in range(2):
        with pytest.raises(EngineStoppedError, match="stopped"):
            llm.generate(ASKS[0].as_prompt, ASKS[0].params)
        with pytest.raises(EngineStoppedError):
            core.step()
        llm.shutdown()


@LATE
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("hook", [*DEVICE_HOOKS, *POLICIES])
def test_a_hook_that_raises(hook: str, call: int, late: bool, target: PlainReference) -> None:
    """SpeculatorError names speculator, hook, cause and requests; running and waiting ones fail alike."""
    if hook == "request_finished":
        call = min(call, 2)  # later ones come when every request is finished, and then fail nobody
    hooks = {hook: fail_at(call)}
    if hook == "absorb":
        hooks["candidate_budget"] = lambda *_: 1
    llm = LLM(target.path, scripted(3, **hooks), async_scheduling=late, max_num_seqs=2, max_model_len=32, block_size=4)
    outputs = {}
    stream = llm.stream([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    with pytest.raises(SpeculatorError, match=f"{hook} failed: FaultError: out of luck") as caught:
        outputs.update((output.request_id, output.finished) for output in stream)
    error = caught.value
    owner = "ScriptedConfig" if hook in POLICIES else "ScriptedSpeculator"
    assert (error.speculator, error.hook) == (owner, hook)
    unfinished = [name for name in IDS if not outputs.get(name, False)]
    assert sorted(error.request_ids) == unfinished, "exactly those that did not finish"
    assert [str(each) for each in chain_of(error) if isinstance(each, FaultError)] == ["out of luck"]
    check_stopped(llm)


@LATE
@pytest.mark.parametrize(
    ("policy", "answer"),
    [
        *(("candidate_budget", value) for value in (0, -1, 2.0, "3", None, True)),
        *(("admit_limit", value) for value in (0, -5, 1.5, "2", False)),
    ],
)
def test_a_policy_that_answers_nonsense(policy: str, answer: object, late: bool, target: PlainReference) -> None:
    """Below 1 or no integer: the error names the method, the value and what is allowed."""
    llm = LLM(target.path, scripted(3, **{policy: lambda *_: answer}), async_scheduling=late)
    with pytest.raises(SpeculatorError, match="integer >= 1") as caught:
        llm.generate([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    assert caught.value.hook == policy
    assert repr(answer) in str(caught.value)
    assert sorted(caught.value.request_ids) == IDS
    check_stopped(llm)


def test_other_streams_fail_too(target: PlainReference) -> None:
    """A second stream on the engine is told that it is stopped, and why; it does not hang."""
    llm = LLM(target.path, scripted(3, propose=fail_at(4)))
    first = llm.stream(ASKS[0].as_prompt, ASKS[0].params, request_ids=["a"])
    second = llm.stream(ASKS[1].as_prompt, ASKS[1].params, request_ids=["b"])
    next(first)
    next(second)
    with pytest.raises(SpeculatorError) as caught:
        list(first)
    assert sorted(caught.value.request_ids) == ["a", "b"]
    with pytest.raises(EngineStoppedError, match="out of luck"):
        list(second)
    check_stopped(llm)


@pytest.mark.parametrize("hook", START_UP_HOOKS)
def test_a_hook_that_raises_at_start_up(hook: str, target: PlainReference) -> None:
    """No engine comes of it; the error names speculator and hook."""
    with pytest.raises(SpeculatorError, match=f"{hook} failed: FaultError") as caught:
        LLM(target.path, scripted(3, **{hook: fail_at(1)}))
    owner = "ScriptedSpeculator" if hook == "bind_resources" else "ScriptedConfig"
    assert (caught.value.speculator, caught.value.hook, caught.value.request_ids) == (owner, hook, ())


@pytest.mark.parametrize(
    "error", [ConfigError("width", 3, "less"), CapabilityError("no")], ids=lambda e: type(e).__name__
)
def test_errors_that_say_what_to_change_pass(error: Exception, target: PlainReference) -> None:
    """What `create` raises on purpose reaches the user as it is."""

    def refuse(*_: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        LLM(target.path, scripted(3, create=refuse))
    assert caught.value is error


def test_shutdown(target: PlainReference) -> None:
    """Shutting down in the middle of a stream frees everything; the stream says so instead of hanging."""
    llm = LLM(target.path, scripted(3))
    stream = llm.stream([a.as_prompt for a in ASKS], [a.params for a in ASKS])
    next(stream)
    llm.shutdown()
    with pytest.raises(EngineStoppedError, match="shut down"):
        list(stream)
    check_stopped(llm)


def test_an_engine_fault_stops_the_engine(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is nobody's hook passes as it is, and leaves an engine that is stopped and empty."""
    llm = LLM(target.path, scripted(3))
    monkeypatch.setattr(llm.engine.model, "logits", fail_at(1))
    with pytest.raises(FaultError):
        llm.generate([a.as_prompt for a in ASKS], [a.params for a in ASKS])
    check_stopped(llm)


def test_a_hook_that_fails_after_the_last_request_fails_nobody(
    target: PlainReference, caplog: pytest.LogCaptureFixture
) -> None:
    """When `request_finished` raises for the last request, outputs are complete; the failure is logged and stops it."""
    llm = LLM(target.path, scripted(3, request_finished=fail_at(1)), max_model_len=32)
    output = llm.generate(ASKS[0].as_prompt, ASKS[0].params)[0]
    assert output.finished
    assert "request_finished failed: FaultError" in caplog.text
    with pytest.raises(EngineStoppedError, match="request_finished"):
        llm.generate(ASKS[0].as_prompt, ASKS[0].params)
