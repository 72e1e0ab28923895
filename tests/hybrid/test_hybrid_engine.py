"""The engine around recurrent states: pools, preemption, aborts, lowering with reasons, refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hybrid_reference import MAX_LEN, Hybrids
from hybrid_rounds import Found, drive

from specround import LLM, SamplingParams
from specround.contract import (
    BudgetView,
    CapabilityError,
    ConfigError,
    LayerDescriptor,
    ModelError,
    SpecLimit,
    SpecResources,
    SpeculatorConfig,
)
from specround.engine.state_pool import StatePool
from specround.models.causal_lm import CausalModel
from specround.models.families import FAMILIES
from specround.speculators.suffix_tree import SuffixTreeConfig

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1], [9, 9, 9, 9], [30, 2, 30, 2, 30], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SUFFIX = {"method": "suffix_tree", "num_speculative_tokens": 5, "suffix_decoding_max_spec_factor": 4.0}
MAMBA1 = sorted(name for name, family in FAMILIES.items() if family.verifies == "none")


def greedy(count: int = 12) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _ in PROMPTS]


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", ["bamba", "qwen3_next"])
def test_preempted_requests_start_from_zero_states(model_type: str, state_mode: str, hybrids: Hybrids) -> None:
    """With KV blocks for one request and a half, requests are preempted and still leave what decoding leaves."""
    reference = hybrids[model_type]
    answers = reference.plain(PROMPTS, greedy(24))
    llm = LLM(
        reference.path,
        SUFFIX,
        max_model_len=MAX_LEN,
        max_num_seqs=3,
        block_size=2,
        num_blocks=MAX_LEN // 2,
        state_mode=state_mode,
    )
    core, found = llm.engine.core, Found()
    assert drive(llm, reference, PROMPTS, greedy(24), found) == answers
    assert found.worst <= 1e-4
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("state_mode", "blocks"), [("replay", 2), ("slots", 12), ("slots", 17)])
def test_admission_waits_for_state_blocks(state_mode: str, blocks: int, hybrids: Hybrids) -> None:
    """With states for two requests never more than two run, and all finish with plain decoding's text."""
    reference = hybrids["bamba"]
    llm = LLM(
        reference.path, SUFFIX, max_model_len=MAX_LEN, max_num_seqs=4, state_mode=state_mode, num_state_blocks=blocks
    )
    running = []
    real = llm.engine.core.scheduler.schedule

    def schedule() -> Any:
        step = real()
        running.append(len(llm.engine.core.scheduler.running))
        return step

    llm.engine.core.scheduler.schedule = schedule  # type: ignore[method-assign]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == reference.plain(PROMPTS, greedy())
    assert max(running) == 2


def test_state_blocks_return_when_requests_are_aborted(hybrids: Hybrids) -> None:
    """An aborted request's states can be given to the next one, which starts from zero."""
    reference = hybrids["mamba2"]
    llm = LLM(reference.path, SUFFIX, max_model_len=MAX_LEN, max_num_seqs=1)
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, greedy(40)[0])
    next(stream)
    next(stream)
    stream.close()
    output = llm.generate({"prompt_token_ids": PROMPTS[4]}, greedy()[0])[0]
    assert [list(output.outputs[0].token_ids)] == reference.plain(PROMPTS[4:], greedy()[:1])
    states = llm.engine.core.scheduler.states
    assert states is not None
    assert states.allocate() is not None


def test_budget_view_counts_blocks_held_for_drafts(hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_spec_blocks_held` is what running requests hold beyond their committed states: K each in mode "slots"."""
    seen: dict[str, set[tuple[int, int]]] = {"replay": set(), "slots": set()}
    for mode, pairs in seen.items():

        def candidate_budget(config: SpeculatorConfig, view: BudgetView, pairs: set[tuple[int, int]] = pairs) -> int:
            pairs.add((view.num_running, view.num_spec_blocks_held))
            return 6

        monkeypatch.setattr(SuffixTreeConfig, "candidate_budget", candidate_budget)
        llm = LLM(hybrids["bamba"].path, SUFFIX, max_model_len=MAX_LEN, max_num_seqs=3, state_mode=mode)
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy())
    assert {held for _, held in seen["replay"]} == {0}
    assert {running * 5 for running, _ in seen["slots"]} == {held for _, held in seen["slots"]} != {0}


def test_masks_run_as_trees_and_the_reason_is_logged_once(hybrids: Hybrids, caplog: pytest.LogCaptureFixture) -> None:
    """A target with attention and recurrent layers verifies trees: the speculator adapts, one line says why."""
    speculation = {"method": "adversarial", "num_speculative_tokens": 4, "vocab_size": 64, "use_masks": True}
    with caplog.at_level(logging.WARNING, logger="specround"):
        llm = LLM(hybrids["bamba"].path, speculation, max_model_len=MAX_LEN)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, lines
    assert "at most a tree, not a mask" in lines[0]
    assert "recurrent state" in lines[0]
    assert llm.engine.plan_kind == "tree"


@pytest.mark.parametrize("model_type", MAMBA1)
def test_mamba1_generates_and_refuses_speculation(model_type: str, hybrids: Hybrids) -> None:
    """A Mamba1 layer verifies nothing: speculation is an error with the reason, plain decoding leaves right states."""
    reference = hybrids[model_type]
    with pytest.raises(CapabilityError, match="Mamba1"):
        LLM(reference.path, SUFFIX, max_model_len=MAX_LEN)
    answers = reference.plain(PROMPTS, greedy())
    llm, found = LLM(reference.path, max_model_len=MAX_LEN, max_num_seqs=3, max_num_batched_tokens=6), Found()
    assert drive(llm, reference, PROMPTS, greedy(), found) == answers
    assert found.worst <= 1e-4


def test_a_layer_that_declares_chains_lowers_the_model(
    hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a mixer declares counts beside what kernels support: one layer's chain makes the model's, and says why."""
    real = CausalModel.limits.fget
    assert real is not None
    limit = SpecLimit("chain", "Derived declares no plan kind of its own")
    monkeypatch.setattr(CausalModel, "limits", property(lambda model: (*real(model), limit)))
    with caplog.at_level(logging.WARNING, logger="specround"):
        llm = LLM(hybrids["bamba"].path, SUFFIX, max_model_len=MAX_LEN)
    assert llm.engine.plan_kind == "chain"
    assert sum("Derived declares no plan kind" in record.getMessage() for record in caplog.records) == 1
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == hybrids["bamba"].plain(PROMPTS, greedy())


def test_a_recurrent_draft_model_is_refused(hybrids: Hybrids) -> None:
    """States of draft models are not kept, and the error says so."""
    speculation = {"method": "draft_model", "model": hybrids["bamba"].path, "num_speculative_tokens": 3}
    with pytest.raises(ModelError, match="attention layers only"):
        LLM(hybrids["bamba"].path, speculation, max_model_len=MAX_LEN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state_mode": "paged"}, "state_mode='paged': must be 'replay' or 'slots'"),
        ({"num_state_blocks": 0}, "num_state_blocks=0"),
        ({"num_state_blocks": 5, "state_mode": "slots"}, "num_state_blocks=5: must be at least 6"),
    ],
)
def test_bad_state_settings(settings: dict[str, Any], message: str, hybrids: Hybrids) -> None:
    """Errors name field, value and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        LLM(hybrids["bamba"].path, SUFFIX, max_model_len=MAX_LEN, **settings)


def test_settings_of_a_model_without_attention(hybrids: Hybrids) -> None:
    """KV memory of any size is enough for a model that stores none."""
    for settings in ({"kv_cache_memory_bytes": 1 << 30}, {"kv_cache_memory_bytes": 64}, {"num_blocks": 8}):
        llm = LLM(hybrids["mamba2"].path, max_model_len=MAX_LEN, **settings)
        assert llm.generate({"prompt_token_ids": [1, 2]}, greedy(3)[0])[0].error is None


def test_state_blocks_of_a_model_without_states(drafter: str) -> None:
    """A number of state blocks for a model that has no states is refused."""
    with pytest.raises(ConfigError, match="num_state_blocks=4: must be None for model type 'llama'"):
        LLM(drafter, max_model_len=MAX_LEN, num_state_blocks=4)


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
def test_a_declined_state_commit_keeps_the_built_in_one(
    state_mode: str, hybrids: Hybrids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's commit kernel that declines a layer is never called, and the text is plain decoding's."""

    class Declining:
        def supports(self, layer: LayerDescriptor) -> SpecLimit:
            return SpecLimit("none", "cannot move states")

        def bind(self, resources: SpecResources) -> None:
            pass

        def __call__(self, *arguments: Any) -> None:
            raise AssertionError("called although it declined")

    provider = (lambda: {f"layout:mamba_state@{state_mode}/commit": Declining()},)
    monkeypatch.setattr(SuffixTreeConfig, "spec_kernel_providers", provider)
    llm = LLM(hybrids["bamba"].path, SUFFIX, max_model_len=MAX_LEN, state_mode=state_mode)
    assert llm.engine.plan_kind == "chain"
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy())
    assert [list(output.outputs[0].token_ids) for output in outputs] == hybrids["bamba"].plain(PROMPTS, greedy())


def test_flush_leaves_nothing_pending(hybrids: Hybrids) -> None:
    """After a flush nothing is pending, a second one changes nothing, and decoding goes on with plain text."""
    reference = hybrids["bamba"]
    llm = LLM(reference.path, SUFFIX | {"num_speculative_tokens": 8}, max_model_len=MAX_LEN)
    core, tokens, flushed = llm.engine.core, [], 0
    _, ids = llm._inputs.tokenise({"prompt_token_ids": PROMPTS[3]})
    core.add(llm._inputs.build("one", ids, greedy(24)[0], 0))
    states = core.runner.states
    assert states is not None
    while core.has_work:
        for update in core.step():
            tokens += update.new_token_ids
        flushed += int(states.tables.pending_len.sum())
        states.flush()
        assert int(states.tables.pending_len.sum()) == 0
        before = [cache.clone() for layer in states.layers for _, cache in layer.caches()]
        states.flush()
        assert all(
            torch.equal(one, two)
            for one, two in zip(before, (c for layer in states.layers for _, c in layer.caches()), strict=True)
        )
    assert flushed > 0
    assert [tokens] == reference.plain(PROMPTS[3:4], greedy(24)[:1])


def test_spans_are_taken_whole() -> None:
    """A span is taken whole or not at all, and what is held for drafts is the rest of it."""
    pool = StatePool(num_blocks=7, span=3)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None
    assert second is not None
    assert pool.allocate() is None
    assert pool.num_draft_blocks_held == 4
    pool.free(first)
    assert pool.num_draft_blocks_held == 2
    assert set(pool.allocate() or ()) <= {*first, 7}
