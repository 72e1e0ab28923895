"""Sampling parameters of requests inside released vLLM, beside requests that have none."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytestmark = pytest.mark.vllm

DRAFTED = {
    "allowed_token_ids": {"allowed_token_ids": [1, 2, 5, 8, 13, 21]},
    "stop_token_ids": {"stop_token_ids": [3, 9]},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
"""Parameters whose requests verify drafts."""

PLAIN = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [3, 9, 11, 17]},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprob_token_ids": [2, 7]},
    "bad_words": {"bad_words": ["a", "b", "c", "d", "e", "f"]},
    "structured_outputs": {"structured_outputs": {"regex": "[a-f]{60}"}},
}
"""Parameters whose requests verify no drafts."""

WITH_TOKENIZER = ("bad_words", "structured_outputs")


@pytest.mark.parametrize("name", DRAFTED | PLAIN)
def test_parameters(request, name):
    """Every second request has the parameter: tokens and logprobs are plain vLLM's, which the parameter changes."""
    target = request.getfixturevalue("talker" if name in WITH_TOKENIZER else "llama")
    parameter = (DRAFTED | PLAIN)[name]
    asks = [ask | (parameter if i % 2 and ask["max_tokens"] > 4 else {}) for i, ask in enumerate(target.asks)]
    changed = replace(target, folder=target.folder / name, asks=asks)
    changed.folder.mkdir()
    plain = changed.plain_run
    made = changed.run("drafted", changed.config("adversarial"))
    assert made["tokens"] == plain["tokens"]
    assert flat(made["logprobs"]) == pytest.approx(flat(plain["logprobs"]), abs=1e-4)
    assert bool(flat(plain["logprobs"])) == ("logprob" in name)
    different = [i for i, tokens in enumerate(plain["tokens"][0]) if tokens != target.plain[i]]
    assert bool(different) == ("logprob" not in name)
    assert all(i % 2 for i in different)
    longest = [max(len(tokens) for tokens in made["rounds"][str(ask["prompt"])]) for ask in asks]
    assert max(longest[::2]) > 1
    if name in PLAIN:
        assert [count for count, ask in zip(longest, asks, strict=True) if set(parameter) & set(ask)] == [1, 1]
    elif name != "stop_token_ids":  # such a request may stop at its first token
        assert max(longest[1::2]) > 1


def test_filters(llama):
    """Top-k and top-p keep their drafts: a text is the same with and without, and greedy when one token is left."""
    filters = [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 6, "top_p": 0.9}, {"top_p": 0.7}]
    asks = [ask | {"max_tokens": 20} for ask in llama.asks[:4]]
    batch = [ask | {"temperature": 1.1, "seed": i} | filters[i] for i, ask in enumerate(asks)]
    made = llama.run("filters", llama.config("adversarial"), batches=[batch])
    nothing = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 0]]}
    plain = llama.run("filters-plain", nothing, batches=[batch])
    assert made["tokens"] == plain["tokens"]
    assert made["tokens"][0][0] == llama.plain[0][:20]
    assert made["tokens"][0][1][:12] == llama.plain[1]
    assert made["tokens"][0][2] != llama.plain[2][:20]
    assert made["moves"] > 0, "commit had nothing to move"
    assert max(plain["rows"]) == 1


@pytest.mark.parametrize("parameter", [{"min_p": 0.1, "temperature": 1.0}, {"logit_bias": {"3": 2.0}}])
def test_parameters_that_vllm_refuses(llama, parameter):
    """Both are refused by vLLM itself beside any speculation, ours included; if that ends, our docs are wrong."""
    asks = [llama.asks[1] | parameter]
    with pytest.raises(AssertionError, match="min_p and logit_bias sampling parameters are not yet supported"):
        llama.run("refused-" + "-".join(parameter), llama.config("ngram"), batches=[asks])


def flat(logprobs):
    """One list of token ids and values, in the order of requests and positions."""
    return [number for batch in logprobs for request in batch for pair in request for number in pair]
