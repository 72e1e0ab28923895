"""Requests that only the model's numbers rule out are refused alone; the others of the batch are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from plain_reference import Ask, PlainReference, check_at_rest

from specround import LLM, SamplingParams
from specround.contract import RequestError
from tiny_models import tiny_llama, write_tokenizer

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])


@pytest.mark.parametrize("temperature", [1e39, 1e300, 1e7])
def test_a_temperature_that_no_float_can_carry(temperature: float) -> None:
    """Infinite on the device, or so large that the law drowns in rounding: refused before there is a request."""
    with pytest.raises(RequestError, match=r"temperature=1e\+|temperature=10000000") as caught:
        SamplingParams(temperature=temperature)
    assert caught.value.field == "temperature"


@LATE
def test_the_largest_temperature_is_served(late: bool, target: PlainReference) -> None:
    """It makes a nearly uniform law; neighbours in the batch get the tokens of plain decoding."""
    asks = [Ask((3, 4), 6), Ask((3,), 60, 1e6, 1), Ask((5,), 6, 0.8, 3)]
    llm = LLM(target.path, {"method": "ngram", "num_speculative_tokens": 3}, async_scheduling=late)
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert tokens == target.answers(asks)
    assert len(set(tokens[1])) > 12
    assert all(0 <= token < 24 for token in tokens[1])
    check_at_rest(llm)


@LATE
def test_a_tokenizer_larger_than_the_model(late: bool, tmp_path: Path) -> None:
    """Text whose tokens lie beyond the model's vocabulary is refused alone, in generate and in chat."""
    path = tiny_llama(tmp_path, vocab_size=270, seed=4)
    write_tokenizer(path, 280)
    llm = LLM(str(path), async_scheduling=late)
    assert llm.tokenizer.encode("ll") == [270]
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs = llm.generate(["x", "all", "y"], params)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, RequestError)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert all(len(outputs[i].outputs[0].token_ids) > 0 for i in (0, 2))
    assert [llm.generate(text, params)[0].outputs[0].token_ids for text in ("x", "y")] == [
        outputs[i].outputs[0].token_ids for i in (0, 2)
    ]
    with pytest.raises(RequestError, match=r"prompt_token_ids=270.*269"):
        llm.generate("all", params)
    chats = llm.chat([[{"role": "x", "content": "x"}], [{"role": "x", "content": "all"}]], params)
    assert [chat.error is None for chat in chats] == [True, False]
    check_at_rest(llm)
