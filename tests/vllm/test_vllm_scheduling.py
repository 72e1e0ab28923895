"""Policies, preemption, prefix caching and requests without drafts inside released vLLM."""

from __future__ import annotations

import pytest
from vllm_targets import ENGINE

pytestmark = pytest.mark.vllm


def test_policies(llama):
    """The speculator admits two requests at a time and sets the rows of every round."""
    config = {"method": "suffix_with_policies", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 8.0}
    made = llama.run("policies", config)
    assert made["tokens"][0] == llama.plain
    assert made["most_running"] == 2
    assert max(made["rows"]) <= 5
    assert min(rows for rows in made["rows"] if rows) == 1


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_preemption(llama, name):
    """With seven blocks, requests are preempted and prefilled again; tokens are identical."""
    asks = [ask | {"max_tokens": 60} for ask in llama.asks[:5]]
    plain = llama.run("preempted-plain", None, batches=[asks])
    engine = ENGINE | {"num_gpu_blocks_override": 8}
    made = llama.run(f"preempted-{name}", llama.config(name), batches=[asks], engine=engine)
    assert made["preemptions"] > 0
    assert made["tokens"] == plain["tokens"]
    assert made["leaked_blocks"] == 0


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_prefix_caching(llama, name):
    """A request that finds committed blocks in the prefix cache goes on as plain decoding does."""
    first = [ask | {"max_tokens": 40} for ask in llama.asks[:4]]
    plain = llama.run("cached-plain", None, batches=[first])["tokens"][0]
    longer = [
        {"prompt": ask["prompt"] + made, "max_tokens": 20, "temperature": 0.0}
        for ask, made in zip(first, plain, strict=True)
    ]
    batches = [first, longer]
    without = llama.run("cached-without", None, batches=batches)
    engine = ENGINE | {"enable_prefix_caching": True}
    made = llama.run(f"cached-{name}", llama.config(name), batches=batches, engine=engine)
    assert made["tokens"] == without["tokens"]
    assert made["hits"] > 0


def test_requests_that_need_a_history_verify_no_drafts(llama):
    """A repetition penalty is applied as plain vLLM applies it, beside requests that speculate."""
    asks = [ask | ({"repetition_penalty": 1.5} if i % 2 else {}) for i, ask in enumerate(llama.asks)]
    plain = llama.run("penalty-plain", None, batches=[asks])
    made = llama.run("penalty", llama.config("adversarial"), batches=[asks])
    assert made["tokens"] == plain["tokens"]
    for ask in asks[1::2]:
        assert all(len(tokens) == 1 for tokens in made["rounds"][str(ask["prompt"])])


def test_windows(mistral):
    """Windows of seven tokens, smaller than the trees, measure positions and not slots."""
    assert mistral.run("mask", mistral.config("adversarial_mask"))["tokens"][0] == mistral.plain


def test_a_failing_hook_is_named(llama):
    """An exception in a hook ends the run with the names of speculator, hook and cause."""
    with pytest.raises(AssertionError, match=r"SuffixTreeSpeculator\.plan failed: ZeroDivisionError: the third round"):
        llama.run("failing", {"method": "failing", "num_speculative_tokens": 4})
