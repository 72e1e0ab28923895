"""After every round every KV slot, target and draft, holds what plain decoding of the same tokens leaves."""

from __future__ import annotations

from typing import Any

import adversarial  # noqa: F401  (registers the speculator)
import pytest
import torch
from cache_oracle import TOLERANCE, Comparison, Reference, params, plain_answers, run_and_compare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specround.round.layout as layout_module
import specround.round.spec_round as spec_round_module
from specround import LLM, SamplingParams
from specround.contract import AcceptResult

VOCAB = 64
MAX_LEN = 64

fixed_models = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts, lengths and engine settings that mix prefill, decode, preemption and late results."""
    count = draw(st.integers(1, 4))
    token = st.integers(0, VOCAB - 1)
    drafts = draw(st.sampled_from([1, 2, 3, 7, 15]))
    block_size = draw(st.sampled_from([1, 4, 16, 64]))
    needed = -(-MAX_LEN // block_size)
    return {
        "prompts": draw(st.lists(st.lists(token, min_size=1, max_size=20), min_size=count, max_size=count)),
        "lengths": draw(st.lists(st.integers(1, 24), min_size=count, max_size=count)),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "drafts": drafts,
        "seed": draw(st.integers(0, 2**16)),
        "use_masks": draw(st.booleans()),
        "settings": {
            "block_size": block_size,
            "max_num_seqs": draw(st.integers(1, 4)),
            "max_num_batched_tokens": draw(st.sampled_from([4, 9, 33, 128])),
            "num_blocks": needed + draw(st.integers(0, needed)),
            "async_scheduling": draw(st.booleans()),
        },
    }


def sampling_of(work: dict[str, Any]) -> list[SamplingParams]:
    return [params(work["temperature"], length, work["seed"] + i) for i, length in enumerate(work["lengths"])]


def least_compared(work: dict[str, Any]) -> int:
    """Slots that are compared at least: each prompt once, unless all requests may end in their first step."""
    return max((len(p) for p, n in zip(work["prompts"], work["lengths"], strict=True) if n > 1), default=0)


def run_adversarial(target: Reference, work: dict[str, Any]) -> tuple[list[list[int]], list[list[int]], Comparison]:
    sampling = sampling_of(work)
    answers = plain_answers(target, work["prompts"], sampling, MAX_LEN)
    speculation = {
        "method": "adversarial",
        "num_speculative_tokens": work["drafts"],
        "vocab_size": VOCAB,
        "answers": {tuple(p): a for p, a in zip(work["prompts"], answers, strict=True)},
        "use_masks": work["use_masks"],
        "seed": work["seed"],
    }
    llm = LLM(target.path, speculation, max_model_len=MAX_LEN, record_rounds=True, **work["settings"])
    outputs, found = run_and_compare(llm, [target], work["prompts"], sampling)
    return answers, outputs, found


@fixed_models
@given(work=workloads())
def test_adversarial_trees_and_masks_leave_plain_caches(target: Reference, work: dict[str, Any]) -> None:
    """Random trees and masks, ragged candidates, random acceptance: every target slot equals plain decoding's."""
    answers, outputs, found = run_adversarial(target, work)
    assert outputs == answers
    found.check(least=least_compared(work))


@fixed_models
@given(work=workloads(), width=st.integers(1, 3))
def test_draft_kv_follows_the_target(target: Reference, drafter: Reference, work: dict[str, Any], width: int) -> None:
    """With a draft model, target and draft slots equal what each model's plain decoding leaves, chain and tree."""
    sampling = sampling_of(work)
    answers = plain_answers(target, work["prompts"], sampling, MAX_LEN)
    speculation = {
        "method": "draft_model",
        "model": drafter.path,
        "num_speculative_tokens": work["drafts"],
        "max_branching": min(width, work["drafts"]),
    }
    llm = LLM(target.path, speculation, max_model_len=MAX_LEN, record_rounds=True, **work["settings"])
    outputs, found = run_and_compare(llm, [target, drafter], work["prompts"], sampling)
    assert outputs == answers
    found.check(least=least_compared(work))


@fixed_models
@given(work=workloads(), width=st.integers(1, 3))
def test_self_draft_accepts_and_leaves_plain_caches(target: Reference, work: dict[str, Any], width: int) -> None:
    """A target that drafts for itself: long paths are accepted, through later siblings too when it drafts trees."""
    sampling = sampling_of(work)
    answers = plain_answers(target, work["prompts"], sampling, MAX_LEN)
    speculation = {
        "method": "draft_model",
        "model": target.path,
        "num_speculative_tokens": work["drafts"],
        "max_branching": min(width, work["drafts"]),
    }
    llm = LLM(target.path, speculation, max_model_len=MAX_LEN, record_rounds=True, **work["settings"])
    outputs, found = run_and_compare(llm, [target, target], work["prompts"], sampling)
    assert outputs == answers
    found.check(least=least_compared(work))


def fixed_workload(*, use_masks: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (3, 9, 1, 14)]
    return {
        "prompts": prompts,
        "lengths": [24, 20, 24, 18],
        "temperature": 0.0,
        "drafts": 15,
        "seed": 3,
        "use_masks": use_masks,
        "settings": {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 128, "num_blocks": 64},
    }


@pytest.mark.parametrize("use_masks", [False, True], ids=["tree", "mask"])
def test_fixed_workload_is_clean(use_masks: bool, target: Reference) -> None:
    """The workload of the negative controls passes when nothing is broken, and accepted rows really were moved."""
    work = fixed_workload(use_masks=use_masks)
    answers, outputs, found = run_adversarial(target, work)
    assert outputs == answers
    found.check(least=100)
    assert found.tree_moves >= 10, "hardly any path left the first columns"


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
def test_fixed_draft_model_workload_is_clean(width: int, target: Reference) -> None:
    """A target that drafts for itself: target and draft slots agree, and trees move rows where chains move none."""
    work = fixed_workload()
    sampling = sampling_of(work)
    speculation = {
        "method": "draft_model",
        "model": target.path,
        "num_speculative_tokens": 9,
        "max_branching": width,
    }
    llm = LLM(target.path, speculation, max_model_len=MAX_LEN, record_rounds=True, **work["settings"])
    outputs, found = run_and_compare(llm, [target, target], work["prompts"], sampling)
    assert outputs == plain_answers(target, work["prompts"], sampling, MAX_LEN)
    found.check(least=100)
    assert (found.tree_moves >= 10) == (width == 3), found


def no_commit(*_: object) -> None:
    """Broken: accepted KV stays where it was verified."""


def test_control_mask_off(target: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a causal mask over tree rows the property fails by more than 100 x the tolerance."""
    real = layout_module.lay_out_rows

    def causal_rows(num_rows: Any, bounds: Any, context: Any) -> Any:
        bits = context.bits
        if bits is not None:
            column = (
                torch.arange(bits.shape[0])
                - context.row_start[torch.bucketize(torch.arange(bits.shape[0]), context.row_start[1:], right=True)]
            )
            bits = torch.where(bits != 0, (torch.ones_like(bits) << (column + 1).clamp(max=62)) - 1, 0)
        return real(num_rows, bounds, type(context)(**{**context.__dict__, "bits": bits}))

    monkeypatch.setattr(layout_module, "lay_out_rows", causal_rows)
    _, outputs, found = run_adversarial(target, fixed_workload())
    assert found.worst > 100 * TOLERANCE, (found, outputs)


def test_control_commit_off(target: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the KV commit the property fails by more than 100 x the tolerance."""
    monkeypatch.setattr(spec_round_module, "commit_paths", no_commit)
    _, _, found = run_adversarial(target, fixed_workload())
    assert found.worst > 100 * TOLERANCE, found


def test_control_depth_is_row_number(target: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: positions by row number instead of depth fail by more than 100 x the tolerance."""

    def broken(plan: Any) -> Any:
        tables, visible, offsets, committable = real(plan)
        if offsets is not None:
            offsets = torch.arange(offsets.shape[1]).expand_as(offsets)
        return tables, visible, offsets, committable

    real = layout_module._topology
    monkeypatch.setattr(layout_module, "_topology", broken)
    _, _, found = run_adversarial(target, fixed_workload())
    assert found.worst > 100 * TOLERANCE, found


def test_control_bonus_from_wrong_row(target: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a bonus decided by the row before the path's last one changes the text."""

    def broken(layout: Any, output: Any, batch: Any) -> AcceptResult:
        result = real(layout, output, batch)
        tokens = result.token_ids.clone()
        last = (result.num_committed.to(torch.int64) - 1).clamp(min=0)[:, None]
        moved = tokens.gather(1, (last - 1).clamp(min=0))
        return AcceptResult(result.path, result.num_committed, tokens.scatter(1, last, moved))

    real = spec_round_module.accept_match
    monkeypatch.setattr(spec_round_module, "accept_match", broken)
    answers, outputs, _ = run_adversarial(target, fixed_workload())
    assert outputs != answers
