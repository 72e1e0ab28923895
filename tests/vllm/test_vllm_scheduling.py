"""Policies, preemption, prefix caching and requests that leave early, inside released vLLM."""

from __future__ import annotations

import pytest
from vllm_targets import ENGINE

pytestmark = pytest.mark.vllm


def test_policies(some_target):
    """The speculator admits two requests at a time and sets the rows of every round."""
    config = {"method": "suffix_with_policies", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 8.0}
    made = some_target.run("policies", config)
    assert made["tokens"][0] == some_target.plain
    assert made["most_running"] == 2
    assert max(made["rows"]) <= 5
    assert min(rows for rows in made["rows"] if rows) == 1


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_preemption(some_target, name):
    """With seven blocks, requests are preempted and prefilled again; tokens are identical."""
    asks = [ask | {"max_tokens": 60} for ask in some_target.asks[:5]]
    plain = some_target.run("preempted-plain", None, batches=[asks])
    engine = ENGINE | {"num_gpu_blocks_override": 8}
    made = some_target.run(f"preempted-{name}", some_target.config(name), batches=[asks], engine=engine)
    assert made["preemptions"] > 0
    assert made["tokens"] == plain["tokens"]
    assert made["leaked_blocks"] == 0


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_prefix_caching(some_target, name):
    """A request that finds committed blocks in the prefix cache goes on as plain decoding does."""
    first = [ask | {"max_tokens": 40} for ask in some_target.asks[:4]]
    plain = some_target.run("cached-plain", None, batches=[first])["tokens"][0]
    longer = [
        {"prompt": ask["prompt"] + made, "max_tokens": 20, "temperature": 0.0}
        for ask, made in zip(first, plain, strict=True)
    ]
    batches = [first, longer]
    without = some_target.run("cached-without", None, batches=batches)
    engine = ENGINE | {"enable_prefix_caching": True}
    made = some_target.run(f"cached-{name}", some_target.config(name), batches=batches, engine=engine)
    assert made["tokens"] == without["tokens"]
    assert made["hits"] > 0


def test_requests_leave_early(target):
    """Requests that are aborted between steps leave their places; the others generate what they would have."""
    batches = [target.asks]
    made = target.run("aborted", target.config("adversarial_mask"), batches=batches, aborts={"0": 3, "2": 5})
    for i, (tokens, plain) in enumerate(zip(made["tokens"][0], target.plain, strict=True)):
        assert tokens == (plain[: len(tokens)] if i in (0, 2) else plain)
    assert 0 < len(made["tokens"][0][0]) < len(target.plain[0])
    assert made["leaked_blocks"] == 0


def test_sessions_of_streamed_input(llama):
    """Requests whose input comes in chunks generate what they do in plain vLLM, without drafts."""
    sessions = [
        [{"prompt": ask["prompt"], "max_tokens": 9}, {"prompt": [5, 6, 7], "max_tokens": 7, "stop_token_ids": [3, 9]}]
        for ask in llama.asks[:3]
    ]
    plain = llama.run("sessions-plain", None, batches=[], sessions=sessions)
    made = llama.run("sessions", llama.config("self_tree"), batches=[], sessions=sessions)
    assert made["tokens"] == plain["tokens"]
    assert all(len(tokens) > 9 for tokens in made["tokens"][0])
    assert max(made["rows"]) == 1


def test_windows(mistral):
    """Windows of seven tokens, smaller than the trees, measure positions and not slots."""
    assert mistral.run("mask", mistral.config("adversarial_mask"))["tokens"][0] == mistral.plain


def test_a_failing_hook_is_named(llama):
    """An exception in a hook ends the run with the names of speculator, hook, cause and requests."""
    message = r"SuffixTreeSpeculator\.plan failed: ZeroDivisionError: the third round \(requests failed: '0"
    with pytest.raises(AssertionError, match=message):
        llama.run("failing", {"method": "failing", "num_speculative_tokens": 4})
