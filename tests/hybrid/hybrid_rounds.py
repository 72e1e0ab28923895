"""One run of a recurrent or hybrid model under a speculator, compared step by step with one-token decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from adversarial import AdversarialConfig
from hybrid_reference import MAX_LEN, HybridReference, leaves

from specround import LLM, SamplingParams, register_speculator
from specround.contract import SpecResources
from specround.engine.state_cache import StateCache

TOLERANCE = 1e-4
"""Largest error of an entry, relative to the largest entry of its state."""

KINDS = ("chain", "tree", "mask", "ngram", "suffix_tree", "recall", "draft chain", "draft tree")


@register_speculator("adversarial_hybrid_chain")
@dataclass(frozen=True, kw_only=True)
class AdversarialChainConfig(AdversarialConfig):
    """Chains whose first tokens are right, as many as chance says."""

    def declare_resources(self) -> SpecResources:
        return replace(super().declare_resources(), max_branching=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the covering array."""

    model_type: str
    kind: str
    state_mode: str
    block_size: int
    drafts: int
    late: bool
    temperature: float
    token_budget: int


AXES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "state_mode": ("replay", "slots"),
    "block_size": (1, 4, 16),
    "drafts": (1, 3, 7, 15),
    "late": (False, True),
    "temperature": (0.0, 0.8),
    "token_budget": (5, 40),
}


@dataclass
class Found:
    """What a run showed."""

    worst: float = 0.0
    compared: int = 0
    pending: int = 0
    accepted: int = 0


def axes_of(model_types: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Every setting of a case with its values."""
    return {"model_type": tuple(model_types)} | AXES


def workload(case: Case) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 2K + 2 tokens, some of them repetitive, and their sampling."""
    source = random.Random(9)
    longest = min(2 * case.drafts + 2, 24)
    prompts = [[source.randrange(64) for _ in range(n)] for n in (case.drafts % 2 + 1, (longest + 1) // 2)]
    prompts.append([7, 8, 9, 10][: max(1, longest // 2)] * 2)
    return prompts, [
        SamplingParams(temperature=case.temperature, seed=40 + i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate((16, 13, 14))
    ]


def run_case(reference: HybridReference, case: Case, drafter: str) -> tuple[list[list[int]], list[list[int]], Found]:
    """What plain decoding and the case generate, and what comparing every live state after every step found."""
    prompts, sampling = workload(case)
    answers = reference.plain(prompts, sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.left_by([*prompt, *answer])
    llm = LLM(
        reference.path,
        speculation_of(case, drafter, prompts, answers),
        max_model_len=MAX_LEN,
        block_size=case.block_size,
        num_blocks=2 * -(-MAX_LEN // case.block_size),
        max_num_seqs=2,
        max_num_batched_tokens=case.token_budget,
        async_scheduling=case.late,
        state_mode=case.state_mode,
    )
    found = Found()
    return answers, drive(llm, reference, prompts, sampling, found), found


def speculation_of(case: Case, drafter: str, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """The speculator of a case."""
    drafts = {"num_speculative_tokens": case.drafts}
    if case.kind.startswith("draft"):
        width = 1 if case.kind == "draft chain" else min(3, case.drafts)
        return {"method": "draft_model", "model": drafter, "max_branching": width} | drafts
    if case.kind == "recall":
        return {"method": "recall", "branches": min(3, case.drafts)} | drafts
    if case.kind in ("ngram", "suffix_tree"):
        return {"method": case.kind} | drafts
    return {
        "method": "adversarial_hybrid_chain" if case.kind == "chain" else "adversarial",
        "vocab_size": 64,
        "answers": {tuple(p): a for p, a in zip(prompts, answers, strict=True)},
        "use_masks": case.kind == "mask",
        "seed": 3,
    } | drafts


def drive(
    llm: LLM, reference: HybridReference, prompts: list[list[int]], sampling: list[SamplingParams], found: Found
) -> list[list[int]]:
    """Step an engine to its end; after each step compare every live request's states and slots."""
    core = llm.engine.core
    outputs: dict[str, list[int]] = {}
    for i, (prompt, param) in enumerate(zip(prompts, sampling, strict=True)):
        _, ids = llm._inputs.tokenise({"prompt_token_ids": prompt})
        core.add(llm._inputs.build(str(i), ids, param, 0))
        outputs[str(i)] = []
    while core.has_work:
        for update in core.step():
            outputs[update.request_id] += update.new_token_ids
            found.accepted += update.accepted
        compare_live(core, reference, found)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_total, "KV blocks leaked"
    assert core.scheduler.states._pool.num_free == core.scheduler.states._pool.num_total, "state blocks leaked"
    return [outputs[str(i)] for i in range(len(prompts))]


def compare_live(core: Any, reference: HybridReference, found: Found) -> None:
    """Compare committed states and slots, as the device's own counts name them, with those of one-token decoding."""
    states, state = core.runner.states, core.runner.state
    found.pending += int(states.tables.pending_len.sum())
    with flushed(states):
        for request in core.scheduler.running:
            count = int(state.num_computed_tokens[request.req_idx])
            if count == 0:
                continue
            tokens = state.token_history[request.req_idx, :count].tolist()
            expected = reference.left_by(tokens)
            for (name, ours), (expected_name, theirs) in zip(
                leaves(core, request.req_idx, count), expected, strict=True
            ):
                assert name == expected_name
                scale = float(theirs.abs().max())
                error = float((ours - theirs).abs().max())
                found.worst = max(found.worst, error / scale if scale else error)
            found.compared += count


@contextmanager
def flushed(states: StateCache) -> Iterator[None]:
    """Fold in what is pending, look, and put everything back: the next round must fold it by itself."""
    tensors = [cache for layer in states.layers for _, cache in layer.caches()] + [states.tables.pending_len]
    before = [tensor.clone() for tensor in tensors]
    states.flush()
    try:
        yield
    finally:
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
