"""Speculators inside released vLLM generate what vLLM generates without them, and what they do elsewhere."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.vllm

NAMES = ["ngram", "suffix_tree", "recall", "foreign_tree", "adversarial", "adversarial_mask"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_plain_vllms(target, name):
    """Requests share four places, prompts are prefilled in chunks; tokens are identical, no block is lost."""
    made = target.run(name, target.config(name))
    assert made["tokens"][0] == target.plain
    assert made["most_running"] == 4
    assert made["leaked_blocks"] == 0
    if name != "foreign_tree":
        assert sum(map(len, made["rounds"].values())) < sum(map(len, target.plain)), "no draft was ever accepted"
    if name.startswith("adversarial"):
        assert made["moves"] > 10, "commit had nothing to move"


@pytest.mark.parametrize("name", ["suffix_tree", "adversarial_mask"])
def test_a_real_model(smollm2, name):
    """SmolLM2 generates what it generates in plain vLLM."""
    assert smollm2.run(f"real-{name}", smollm2.config(name))["tokens"][0] == smollm2.plain


def test_tokens_are_plain_vllms_on_the_triton_kernels(llama):
    """Masks over chunked prompts, verified and committed by the GPU's kernels in the interpreter: the same tokens."""
    batch = [ask | {"max_tokens": min(ask["max_tokens"], 10)} for ask in llama.asks[:4]]
    made = llama.run("on-triton", llama.config("adversarial_on_triton"), batches=[batch])
    assert made["tokens"][0] == [tokens[:10] for tokens in llama.plain[:4]]
    assert made["moves"] > 3, "commit had nothing to move"


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


def test_draft_layers(llama):
    """A drafter with attention layers of its own, one with a window, drafts the same tokens in both hosts."""
    drafts = {}
    for host in ("vllm", "embedded"):
        log = llama.folder / f"drafts-{host}.jsonl"
        config = {"method": "module", "num_speculative_tokens": 3, "log_file": str(log)}
        made = llama.run(f"module-{host}", config, host=host)
        assert made["tokens"][0] == llama.plain
        lines = map(json.loads, log.read_text().splitlines())
        drafts[host] = {tuple(known): tokens for known, tokens in lines}
    assert drafts["vllm"] == drafts["embedded"]
    assert len(drafts["vllm"]) > 60


@pytest.mark.parametrize("broken", ["mask", "commit"])
def test_negative_controls(some_target, broken):
    """Without the tree mask, or without commit, the tokens differ: the tests above can fail."""
    made = some_target.run(f"broken-{broken}", some_target.config("adversarial"), broken=broken)
    assert made["tokens"][0] != some_target.plain


def test_steps_are_accepted_whole(llama):
    """Logits that vLLM itself would verify request by request, to save memory, are accepted together."""
    assert llama.run("chunks", llama.config("adversarial"), broken="chunks")["tokens"][0] == llama.plain


@pytest.mark.parametrize("name", ["ngram", "suffix_tree", "recall"])
def test_rounds_are_the_embedded_engines(some_target, name):
    """The same class commits the same tokens round by round in both hosts."""
    config = some_target.config(name)
    here = some_target.run(f"{name}-here", config)
    there = some_target.run(f"{name}-there", config, host="embedded")
    assert here["tokens"] == there["tokens"]
    for prompt, rounds in there["rounds"].items():
        assert here["rounds"][prompt] == rounds


@pytest.mark.parametrize("name", ["adversarial", "adversarial_mask"])
def test_random_rounds_are_the_embedded_engines(some_target, name):
    """A speculator that draws at random draws the same when requests come one at a time."""
    config, batches = some_target.config(name), [[ask] for ask in some_target.asks[:4]]
    here = some_target.run(f"{name}-alone", config, batches=batches)
    there = some_target.run(f"{name}-alone-there", config, batches=batches, host="embedded")
    assert here["tokens"] == there["tokens"]
    assert here["rounds"] == there["rounds"]


def test_sampled_text_does_not_depend_on_speculation(some_target):
    """A seeded request samples the same text with drafts, and the embedded engine samples that text too."""
    asks = [ask | {"temperature": 0.8, "seed": 3 + place} for place, ask in enumerate(some_target.asks)]
    tree = some_target.run("sampled", some_target.config("suffix_tree"), batches=[asks])
    drafted = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4, 0]], "method": "ngram"}
    plain = some_target.run("sampled-plain", drafted, batches=[asks])
    there = some_target.run("sampled-there", some_target.config("suffix_tree"), batches=[asks], host="embedded")
    assert tree["tokens"] == plain["tokens"] == there["tokens"]
    assert tree["tokens"][0] != some_target.plain
