"""Several `stream` and `generate` calls on one engine at the same time: each gets its own requests' tokens."""

from __future__ import annotations

import pytest
from plain_reference import Ask, PlainReference, check_at_rest
from speculator_fleet import MAX_MODEL_LEN, Models

from specround import LLM, SamplingParams
from specround.contract import RequestError

FIRST, SECOND = Ask((4, 5, 6), 20), Ask((9, 8), 17, temperature=0.8, seed=3)


@pytest.fixture
def llm(models: Models) -> LLM:
    return LLM(models.target.path, models.config("self_tree", 3), max_model_len=MAX_MODEL_LEN, async_scheduling=True)


def test_streams_take_turns(llm: LLM, target: PlainReference) -> None:
    """Two streams read in turns: steps of one also serve the other, and no token is lost."""
    streams = [llm.stream(ask.as_prompt, ask.params) for ask in (FIRST, SECOND)]
    outputs = {}
    while streams:
        for stream in tuple(streams):
            output = next(stream, None)
            if output is None:
                streams.remove(stream)
            else:
                outputs[output.request_id] = output
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs.values()]
    assert tokens == target.answers([FIRST, SECOND])
    check_at_rest(llm)


def test_generate_inside_a_stream(llm: LLM, target: PlainReference) -> None:
    """A whole `generate` in the middle of a stream neither loses the stream's tokens nor waits for them."""
    stream = llm.stream(FIRST.as_prompt, FIRST.params)
    output = next(stream)
    inner = llm.generate(SECOND.as_prompt, SECOND.params)
    for output in stream:  # noqa: B007  (the last one is meant)
        pass
    assert tuple(inner[0].outputs[0].token_ids) == target.answers([SECOND])[0]
    assert tuple(output.outputs[0].token_ids) == target.answers([FIRST])[0]
    check_at_rest(llm)


def test_an_id_belongs_to_one_run_at_a_time(llm: LLM, target: PlainReference) -> None:
    """An id in use is refused; once aborted it may be used by another run before the first one noticed."""
    stream = llm.stream(FIRST.as_prompt, FIRST.params, request_ids=["x"])
    output = next(stream)
    with pytest.raises(RequestError, match="request_id"):
        llm.generate(SECOND.as_prompt, SECOND.params, request_ids=["x"])
    llm.abort(["x"])
    second = llm.stream(SECOND.as_prompt, SECOND.params, request_ids=["x"])
    other = next(second)
    for output in stream:  # noqa: B007
        pass
    assert output.outputs[0].finish_reason == "abort"
    for other in second:  # noqa: B007
        pass
    assert tuple(other.outputs[0].token_ids) == target.answers([SECOND])[0]
    check_at_rest(llm)


def test_abort_before_anything_ran(llm: LLM) -> None:
    """Aborting unknown ids on a fresh engine is a no-op."""
    llm.abort(["nobody"])
    check_at_rest(llm)


def test_dropping_one_stream_leaves_the_other(llm: LLM, target: PlainReference) -> None:
    """Closing a stream aborts its own requests only."""
    stream = llm.stream(FIRST.as_prompt, FIRST.params)
    dropped = llm.stream([SECOND.as_prompt] * 3, SamplingParams(temperature=0, max_tokens=20))
    output = next(stream)
    next(dropped)
    dropped.close()
    for output in stream:  # noqa: B007
        pass
    assert tuple(output.outputs[0].token_ids) == target.answers([FIRST])[0]
    check_at_rest(llm)
