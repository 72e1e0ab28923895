"""Ends of requests inside accepted blocks: stop tokens, token limits, the context limit, aborts."""

from __future__ import annotations

import pytest
from plain_reference import Ask, PlainReference, Tally, check_at_rest
from speculator_fleet import MAX_MODEL_LEN, Models

from specround import LLM, RequestOutput, SamplingParams

PROMPT = (5, 9, 5, 9, 5)
LENGTH = 20
FLEET = ("self_draft", "self_tree", "suffix_tree", "adversarial")


@pytest.fixture(scope="module")
def greedy(target: PlainReference) -> list[int]:
    return list(target.answers([Ask(PROMPT, LENGTH)])[0])


def engine(models: Models, name: str, drafts: int, late: bool, **settings: object) -> LLM:
    config = models.config(name, drafts, [Ask(PROMPT, LENGTH)])
    return LLM(
        models.target.path, config, max_model_len=MAX_MODEL_LEN, async_scheduling=late, record_rounds=True, **settings
    )


def check_counts(output: RequestOutput) -> None:
    """Counters count the tokens that were delivered, and the recorded rounds tell of no others."""
    completion, metrics = output.outputs[0], output.metrics
    assert metrics.committed == len(completion.token_ids)
    assert [token for trace in output.rounds for token in trace.committed] == completion.token_ids
    assert all(len(trace.path) == len(trace.committed) for trace in output.rounds)
    assert metrics.rounds == len(output.rounds)
    assert metrics.accepted <= metrics.committed


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("name", FLEET)
def test_each_greedy_token_as_stop_token(name: str, late: bool, models: Models, greedy: list[int]) -> None:
    """Whichever token stops, wherever it falls in a block: it is the last token, and counters do not drift."""
    llm = engine(models, name, 7, late)
    prompts = [{"prompt_token_ids": list(PROMPT)}] * LENGTH
    params = [
        SamplingParams(temperature=0, max_tokens=LENGTH, stop_token_ids=[token, token], ignore_eos=True)
        for token in greedy
    ]
    for token, output in zip(greedy, llm.generate(prompts, params), strict=True):
        expected = greedy[: greedy.index(token) + 1]
        completion = output.outputs[0]
        assert completion.token_ids == expected
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
        check_counts(output)
    check_at_rest(llm)


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("drafts", [1, 3, 7, 15])
def test_every_max_tokens(drafts: int, late: bool, models: Models, greedy: list[int]) -> None:
    """max_tokens from 1 to 2K + 2: exactly so many tokens, and never a draft that could not be kept."""
    llm = engine(models, "self_draft", drafts, late)
    counts = list(range(1, min(2 * drafts + 2, LENGTH) + 1))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    for count, output in zip(
        counts, llm.generate([{"prompt_token_ids": list(PROMPT)}] * len(counts), params), strict=True
    ):
        assert output.outputs[0].token_ids == greedy[:count]
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.drafted == output.metrics.accepted
        check_counts(output)
    check_at_rest(llm)


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("name", ["self_draft", "self_tree", "adversarial_mask", "short_draft"])
def test_every_context_limit(name: str, late: bool, models: Models) -> None:
    """Prompts from limit - K - 2 to limit - 1, with no max_tokens and with a huge one: text up to the limit."""
    limit, drafts = 20, 7
    prompts = [tuple((7 * n + 3 * i) % 20 + 3 for i in range(n)) for n in range(limit - drafts - 2, limit)]
    asks = [Ask(prompt, limit - len(prompt)) for prompt in prompts]
    config = models.config(name, drafts, asks)
    llm = LLM(models.target.path, config, max_model_len=limit, async_scheduling=late, block_size=4)
    for wanted in (None, 10**9):
        params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)
        tally = Tally()
        for ask, output in zip(asks, llm.generate([ask.as_prompt for ask in asks], params), strict=True):
            models.target.compare(ask, output.outputs[0].token_ids, tally)
            assert output.outputs[0].finish_reason == "length"
        tally.check()
        check_at_rest(llm)


def test_more_drafts_than_context(models: Models) -> None:
    """K larger than the whole context is legal: the rounds are trimmed."""
    asks = [Ask((4,), 7), Ask((5, 6, 7), 5), Ask(tuple(range(3, 10)), 1)]
    for name in ("self_draft", "self_tree", "adversarial_mask", "ngram", "recall"):
        llm = LLM(models.target.path, models.config(name, 15, asks), max_model_len=8, max_num_seqs=2, block_size=3)
        tally = Tally()
        for ask, output in zip(asks, llm.generate([a.as_prompt for a in asks], [a.params for a in asks]), strict=True):
            models.target.compare(ask, output.outputs[0].token_ids, tally)
        check_at_rest(llm)


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
def test_abort_while_streaming(late: bool, models: Models, greedy: list[int]) -> None:
    """An aborted request keeps what it had, says "abort", and the others go on undisturbed."""
    llm = engine(models, "self_tree", 3, late)
    prompts = [{"prompt_token_ids": list(PROMPT)}] * 3
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    final = {}
    for output in llm.stream(prompts, params, request_ids=["a", "b", "c"]):
        final[output.request_id] = output
        if output.request_id == "b" and not output.finished and len(output.outputs[0].token_ids) >= 5:
            llm.abort(["b", "unknown"])
    kept = final["b"].outputs[0]
    assert kept.finish_reason == "abort"
    assert 5 <= len(kept.token_ids) < LENGTH
    assert kept.token_ids == greedy[: len(kept.token_ids)]
    for other in ("a", "c"):
        assert final[other].outputs[0].token_ids == greedy
        assert final[other].outputs[0].finish_reason == "length"
    for output in final.values():
        check_counts(output)
    check_at_rest(llm)


def test_a_stream_that_is_dropped_frees_everything(models: Models, greedy: list[int]) -> None:
    """Closing a stream aborts its requests; the engine goes on with others as if they had never been."""
    llm = engine(models, "self_draft", 3, True)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    stream = llm.stream([{"prompt_token_ids": list(PROMPT)}] * 4, params)
    next(stream)
    stream.close()
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_total
    assert llm.generate({"prompt_token_ids": list(PROMPT)}, params)[0].outputs[0].token_ids == greedy
    check_at_rest(llm)
