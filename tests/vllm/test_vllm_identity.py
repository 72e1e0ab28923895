"""Speculators inside released vLLM generate what vLLM generates without them, and what they do elsewhere."""

from __future__ import annotations

import pytest
from vllm_targets import VOCAB

pytestmark = pytest.mark.vllm

NAMES = ["ngram", "suffix_tree", "recall", "adversarial", "adversarial_mask"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_plain_vllms(llama, name):
    """Seven requests share four places, prompts are prefilled in chunks; tokens are identical, no block is lost."""
    made = llama.run(name, llama.config(name))
    assert made["tokens"][0] == llama.plain
    assert made["most_running"] == 4
    assert made["leaked_blocks"] == 0
    assert sum(map(len, made["rounds"].values())) < sum(map(len, llama.plain)), "no draft was ever accepted"
    if name.startswith("adversarial"):
        assert made["moves"] > 10, "commit had nothing to move"


@pytest.mark.parametrize("name", ["self_draft", "self_tree", "foreign_tree"])
def test_draft_models(llama, name):
    """A draft model's KV lives beside the target's: tokens and rounds are as elsewhere, whoever drafts."""
    config = llama.config(name)
    made = llama.run(name, config)
    there = llama.run(f"{name}-there", config, host="embedded")
    assert made["tokens"][0] == llama.plain
    assert made["leaked_blocks"] == 0
    assert made["rounds"] == there["rounds"]
    if name == "self_draft":  # the target drafts for itself: every draft is accepted
        lengths = [len(tokens) for rounds in made["rounds"].values() for tokens in rounds[1:-1]]
        assert set(lengths) == {config["num_speculative_tokens"] + 1}


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_tokens_are_plain_vllms_qwen3(qwen3, name):
    """The same on another family."""
    assert qwen3.run(name, qwen3.config(name))["tokens"][0] == qwen3.plain


@pytest.mark.parametrize("broken", ["mask", "commit"])
def test_negative_controls(llama, broken):
    """Without the tree mask, or without commit, the tokens differ: the tests above can fail."""
    config = llama.config("adversarial")
    made = llama.run(f"broken-{broken}", config, broken=broken)
    assert made["tokens"][0] != llama.plain


@pytest.mark.parametrize("name", ["ngram", "suffix_tree", "recall"])
def test_rounds_are_the_embedded_engines(llama, name):
    """The same class commits the same tokens round by round in both hosts."""
    config = llama.config(name)
    here = llama.run(f"{name}-here", config)
    there = llama.run(f"{name}-there", config, host="embedded")
    assert here["tokens"] == there["tokens"]
    for prompt, rounds in there["rounds"].items():
        assert here["rounds"][prompt] == rounds


@pytest.mark.parametrize("name", ["adversarial", "adversarial_mask"])
def test_random_rounds_are_the_embedded_engines(llama, name):
    """A speculator that draws at random draws the same when requests come one at a time."""
    config, batches = llama.config(name), [[ask] for ask in llama.asks[:4]]
    here = llama.run(f"{name}-alone", config, batches=batches)
    there = llama.run(f"{name}-alone-there", config, batches=batches, host="embedded")
    assert here["tokens"] == there["tokens"]
    assert here["rounds"] == there["rounds"]


def test_sampled_text_does_not_depend_on_speculation(llama):
    """A seeded request samples the same text with drafts, and the embedded engine samples that text too."""
    asks = [ask | {"temperature": 0.8, "seed": 3 + place} for place, ask in enumerate(llama.asks)]
    tree = llama.run("sampled", llama.config("suffix_tree"), batches=[asks])
    drafted = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 0]], "method": "ngram"}
    plain = llama.run("sampled-plain", drafted, batches=[asks])
    there = llama.run("sampled-there", llama.config("suffix_tree"), batches=[asks], host="embedded")
    assert tree["tokens"] == plain["tokens"] == there["tokens"]
    assert tree["tokens"][0] != llama.plain


def test_filters_hold_in_every_row(llama):
    """Top-k and top-p that leave one token make sampling greedy, in trees too; allowed tokens are plain vLLM's."""
    filters = [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5}]
    asks = [ask | {"max_tokens": 10} for ask in llama.asks[:3]]  # a step of the interpreted filters takes seconds
    one_left = [ask | {"temperature": 0.8, "seed": i} | filters[i] for i, ask in enumerate(asks)]
    allowed = [ask | {"allowed_token_ids": list(range(i, VOCAB, 3))} for i, ask in enumerate(asks)]
    batches = [one_left, allowed]
    made = llama.run("filters", llama.config("adversarial"), batches=batches)
    assert made["tokens"][0] == [tokens[:10] for tokens in llama.plain[:3]]
    assert made["tokens"] == llama.run("filters-plain", None, batches=batches)["tokens"]
    assert made["moves"] > 0, "commit had nothing to move"


def test_smollm2(run_smollm2):
    """A real model of 135 million weights: the same tokens as plain vLLM, with trees of its own repetitions."""
    plain, made = run_smollm2(None), run_smollm2({"method": "suffix_tree", "num_speculative_tokens": 8})
    assert made["tokens"] == plain["tokens"]
    assert made["rows"].count(9) > 1
    assert sum(map(len, made["rounds"].values())) < sum(map(len, plain["tokens"][0]))
