"""Stop strings inside accepted blocks, in time and one step late: text, tokens, reasons and counters."""

from __future__ import annotations

from itertools import product

import pytest
from plain_reference import PlainReference, check_at_rest

from specround import LLM, RequestOutput, SamplingParams

PROMPT = "the rain in the hills"
TOKENS = 40


@pytest.fixture(scope="module", params=[False, True], ids=["in-time", "late"])
def llm(request: pytest.FixtureRequest, speaking: PlainReference) -> LLM:
    """A drafter that is always right, so that stop strings end in the middle of blocks."""
    config = {"method": "draft_model", "model": speaking.path, "num_speculative_tokens": 7}
    return LLM(speaking.path, config, async_scheduling=request.param, max_model_len=128)


@pytest.fixture(scope="module")
def free(speaking: PlainReference) -> tuple[list[int], str]:
    """Tokens and text without any stop."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    completion = speaking.plain.generate(PROMPT, params)[0].outputs[0]
    assert completion.text == speaking.plain.tokenizer.decode(completion.token_ids)
    assert len(completion.text) > 20
    return completion.token_ids, completion.text


def expected_stop(tokens: list[int], decode, stops: list[str]) -> tuple[int, str, int] | None:
    """Tokens until a stop string stands in the text, that string, and its place; by decoding every prefix."""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and count < len(tokens):
            continue
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            place, _, stop = min(found)
            return count, stop, place
    return None


def run(llm: LLM, stops: list[str], include: bool = False, **more: object) -> RequestOutput:
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=stops, include_stop_str_in_output=include, **more
    )
    return llm.generate(PROMPT, params)[0]


def check(llm: LLM, output: RequestOutput, free: tuple[list[int], str], stops: list[str], include: bool) -> None:
    tokens, text = free
    completion = output.outputs[0]
    expected = expected_stop(tokens, llm.tokenizer.decode, stops)
    if expected is None:
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "length", None)
        assert completion.token_ids == tokens
    else:
        count, stop, place = expected
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: place + len(stop) if include else place]
        assert completion.token_ids == tokens[:count]
    assert output.metrics.committed == len(completion.token_ids)
    assert output.metrics.accepted <= output.metrics.committed


@pytest.mark.parametrize("include", [False, True], ids=["cut", "kept"])
def test_every_substring_stops(llm: LLM, free: tuple[list[int], str], include: bool) -> None:
    """Each piece of the text as the stop string, alone: the text ends before (or after) its first occurrence."""
    text = free[1]
    pieces = [text[start : start + length] for start, length in product(range(0, len(text) - 4, 3), (1, 2, 4))]
    stops = [[piece] for piece in dict.fromkeys(pieces)]
    params = [
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=stop, include_stop_str_in_output=include)
        for stop in stops
    ]
    for stop, output in zip(stops, llm.generate([PROMPT] * len(stops), params), strict=True):
        check(llm, output, free, stop, include)
    check_at_rest(llm)


def test_overlapping_and_prefix_stop_strings(llm: LLM, free: tuple[list[int], str]) -> None:
    """Several stop strings, one a prefix of another, overlapping, or absent: the first complete one wins."""
    text = free[1]
    cases = []
    for start in range(2, len(text) - 8, 5):
        short, long, over = text[start : start + 2], text[start : start + 5], text[start + 1 : start + 6]
        cases += [[short, long], [long, short], [long, over], [over, long, "no such text"], ["no such text"]]
    params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=stops) for stops in cases]
    for stops, output in zip(cases, llm.generate([PROMPT] * len(cases), params), strict=True):
        check(llm, output, free, stops, include=False)
    check_at_rest(llm)


def test_streamed_text_never_shrinks(llm: LLM, free: tuple[list[int], str]) -> None:
    """What was streamed is never taken back, although a stop string may begin at the end of the text so far."""
    text = free[1]
    for stop in (text[12:18], text[20:23], text[5:6]):
        seen = ""
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=[stop])
        for output in llm.stream(PROMPT, params):
            assert output.outputs[0].text.startswith(seen)
            seen = output.outputs[0].text
        assert seen == text[: text.index(stop)]


def test_stop_string_and_stop_token_in_one_block(llm: LLM, free: tuple[list[int], str]) -> None:
    """Whichever comes first ends the request: a stop string before a stop token, and the other way round."""
    tokens, text = free
    stop = text[10:12]
    count, _, place = expected_stop(tokens, llm.tokenizer.decode, [stop])
    later = next(token for token in tokens[count:] if token not in tokens[:count])
    completion = run(llm, [stop], stop_token_ids=[later]).outputs[0]
    assert (completion.stop_reason, completion.text, len(completion.token_ids)) == (stop, text[:place], count)
    earlier = tokens[0]
    output = run(llm, [stop], stop_token_ids=[earlier])
    assert (output.outputs[0].stop_reason, output.outputs[0].token_ids) == (earlier, [earlier])
    assert output.outputs[0].text == "", "a stop token is no part of the text"
    assert output.metrics.committed == 1


def test_a_kept_stop_token_is_in_the_text(llm: LLM, free: tuple[list[int], str]) -> None:
    """With include_stop_str_in_output a stop token's text stays; token_ids hold it in both cases."""
    tokens, _ = free
    token = next(token for token in tokens[4:] if token not in tokens[:4])
    count = tokens.index(token) + 1
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            stop_token_ids=[token],
            include_stop_str_in_output=include,
        )
        completion = llm.generate(PROMPT, params)[0].outputs[0]
        assert completion.token_ids == tokens[:count]
        assert completion.text == llm.tokenizer.decode(tokens[: count if include else count - 1])


def test_without_detokenisation(llm: LLM, free: tuple[list[int], str]) -> None:
    """detokenize=False leaves the text empty and changes nothing else."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    completion = llm.generate(PROMPT, params)[0].outputs[0]
    assert (completion.token_ids, completion.text) == (free[0], "")
