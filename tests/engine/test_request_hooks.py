"""request_started and request_finished: exactly the tokens that were delivered, and once for every start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_reference import Ask, PlainReference
from scripted import scripted
from test_hook_failures import ASKS, IDS, FaultError, check_stopped, fail_at

from specround import LLM, SamplingParams
from specround.contract import EngineStoppedError, SpeculatorError

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
PROMPT = "the rain in the hills"
TOKENS = 40
Log = list[tuple[str, tuple[Any, ...]]]


def check_pairs(log: Log) -> dict[str, tuple[int, ...]]:
    """Every start is followed by one finish of the same request and slot; the tokens of the last finish by id."""
    held: dict[int, str] = {}
    last: dict[str, tuple[int, ...]] = {}
    for hook, args in log:
        if hook == "request_started":
            assert args[1] not in held, "the slot is taken"
            held[args[1]] = args[0]
        elif hook == "request_finished":
            assert held.pop(args[1]) == args[0]
            last[args[0]] = tuple(args[2])
    assert not held, f"never told that they left: {held}"
    return last


def always_right(whole: list[int]) -> Any:
    """A `propose` hook that drafts the known continuation of the one request there is."""

    def propose(_: object, view: Any) -> None:
        for r, slot in enumerate(view.req_idx.tolist()):
            root, width = int(view.num_computed_tokens[r]), view.draft_token_ids.shape[1]
            drafts = whole[root + 1 : root + 1 + width]
            view.draft_token_ids[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)

    return propose


@LATE
@pytest.mark.parametrize("include", [False, True], ids=["cut", "kept"])
def test_tokens_of_a_request_that_stops_inside_a_block(include: bool, late: bool, speaking: PlainReference) -> None:
    """Stop strings inside blocks of 8: request_finished has prompt and delivered tokens, none from behind the stop."""
    greedy = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    free = speaking.plain.generate(PROMPT, SamplingParams(**greedy))[0]
    text, whole = free.outputs[0].text, [*free.prompt_token_ids, *free.outputs[0].token_ids]
    log: Log = []
    llm = LLM(speaking.path, scripted(7, propose=always_right(whole), log=log), async_scheduling=late)
    inside = 0
    for start in range(1, 22, 2):
        stop = text[start : start + 2]
        params = SamplingParams(**greedy, stop=[stop], include_stop_str_in_output=include)
        output = llm.generate(PROMPT, params, request_ids=[f"stop {start}"])[0]
        assert output.outputs[0].stop_reason == stop
        delivered = output.outputs[0].token_ids
        inside += (len(delivered) - 1) % 8 != 0
        told = check_pairs(log)[f"stop {start}"]
        assert told == (*output.prompt_token_ids, *delivered)
    assert inside >= 5, "no stop stood inside a block"


@LATE
def test_tokens_of_requests_with_stop_tokens_lengths_and_aborts(late: bool, target: PlainReference) -> None:
    """Stop tokens inside accepted blocks, lengths, and a stream closed half way: each finish repeats what was given."""
    asks = [Ask((3, 4, 5), 30), Ask((9, 2), 30)]
    plain = target.answers(asks)
    whole = [*asks[0].prompt, *plain[0]]
    log: Log = []
    llm = LLM(target.path, scripted(7, propose=always_right(whole), log=log), async_scheduling=late)
    stop = next(token for token in plain[0][3:] if token not in plain[0][:3])
    for name, more in (("length", {"max_tokens": 12}), ("stop", {"max_tokens": 30, "stop_token_ids": [stop]})):
        params = SamplingParams(temperature=0, ignore_eos=True, **more)
        output = llm.generate(asks[0].as_prompt, params, request_ids=[name])[0]
        assert output.outputs[0].finish_reason == name
        assert check_pairs(log)[name] == (*asks[0].prompt, *output.outputs[0].token_ids)
    stream = llm.stream(asks[0].as_prompt, asks[0].params, request_ids=["closed"])
    seen = [next(stream) for _ in range(2)][-1].outputs[0].token_ids
    stream.close()
    llm.generate(asks[1].as_prompt, asks[1].params)
    assert check_pairs(log)["closed"][: 3 + len(seen)] == (*asks[0].prompt, *seen)


@LATE
def test_shutdown_tells_about_every_started_request(late: bool, target: PlainReference) -> None:
    """After a shutdown in mid-stream every started request was reported, with what it had, and no waiting one."""
    log: Log = []
    llm = LLM(target.path, scripted(3, log=log), async_scheduling=late, max_num_seqs=2)
    stream = llm.stream([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    for _ in range(4):
        next(stream)
    llm.shutdown()
    last = check_pairs(log)
    assert sorted(last) == IDS[:2]
    for name, ask, plain in zip(IDS[:2], ASKS, target.answers(ASKS), strict=False):
        assert len(last[name]) > len(ask.prompt)
        assert last[name] == (*ask.prompt, *plain)[: len(last[name])]
    with pytest.raises(EngineStoppedError):
        list(stream)
    llm.shutdown()
    assert check_pairs(log) == last, "a second shutdown has nothing to tell"


@LATE
@pytest.mark.parametrize("hook", ["plan", "accept", "observe_step", "propose", "candidate_budget", "round_finished"])
def test_a_failure_tells_about_every_started_request(hook: str, late: bool, target: PlainReference) -> None:
    """A hook that raises stops the engine; every request that had started is still reported once."""
    log: Log = []
    llm = LLM(target.path, scripted(3, log=log, **{hook: fail_at(4)}), async_scheduling=late, max_num_seqs=2)
    with pytest.raises(SpeculatorError):
        llm.generate([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    last = check_pairs(log)
    assert last
    plain = dict(zip(IDS, zip(ASKS, target.answers(ASKS), strict=True), strict=True))
    for name, told in last.items():
        assert told == (*plain[name][0].prompt, *plain[name][1])[: len(told)]
    check_stopped(llm)


@LATE
def test_a_failing_request_finished_hides_no_other(late: bool, target: PlainReference) -> None:
    """When request_finished itself fails while the engine stops, the other requests are still reported."""
    log: Log = []

    def finished(_: object, request_id: str, *__: object) -> None:
        if request_id == IDS[0]:
            raise FaultError("out of luck")

    llm = LLM(target.path, scripted(3, log=log, request_finished=finished), async_scheduling=late)
    stream = llm.stream([a.as_prompt for a in ASKS], [a.params for a in ASKS], request_ids=IDS)
    next(stream)
    llm.shutdown()
    assert sorted(check_pairs(log)) == IDS
    stream.close()
    check_stopped(llm)
