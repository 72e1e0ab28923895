"""One run of a family under a speculator that tries to break it, compared step by step with the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from adversarial import AdversarialConfig
from family_reference import ROUTER_GAP, FamilyReference

from specround import LLM, SamplingParams, register_speculator
from specround.contract import SpecResources

MAX_LEN = 64
TOLERANCE = 1e-4
"""Largest error of a cache entry, relative to the largest entry of its layer."""

KINDS = ("chain", "tree", "mask", "self chain", "self tree")


@register_speculator("adversarial_chain")
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
    block_size: int
    drafts: int
    late: bool
    temperature: float


AXES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "block_size": (1, 4, 16),
    "drafts": (1, 3, 7, 15),
    "late": (False, True),
    "temperature": (0.0, 0.8),
}


@dataclass
class Found:
    """What a run showed: worst errors, and differences excused by a router's near tie."""

    worst: float = 0.0
    compared: int = 0
    excused: int = 0


def axes_of(model_types: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Every setting of a case with its values."""
    return {"model_type": tuple(model_types)} | AXES


def workload(temperature: float) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts below, at and above the windows, and their sampling."""
    source = random.Random(9)
    prompts = [[source.randrange(64) for _ in range(n)] for n in (3, 8, 17)]
    lengths = (18, 15, 12)
    return prompts, [
        SamplingParams(temperature=temperature, seed=40 + i, max_tokens=n, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]


def run_case(reference: FamilyReference, case: Case) -> tuple[list[list[int]], list[list[int]], Found]:
    """What plain decoding and the case generate, and what comparing every live slot after every step found."""
    prompts, sampling = workload(case.temperature)
    answers = reference.plain(prompts, sampling, MAX_LEN)
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.run([*prompt, *answer])
    llm = LLM(
        reference.path,
        speculation_of(reference, case, prompts, answers),
        max_model_len=MAX_LEN,
        block_size=case.block_size,
        num_blocks=3 * -(-MAX_LEN // case.block_size),
        max_num_seqs=3,
        max_num_batched_tokens=40,
        async_scheduling=case.late,
    )
    found = Found()
    outputs = drive(llm, [reference] * (2 if case.kind.startswith("self") else 1), prompts, sampling, found)
    return answers, outputs, found


def speculation_of(
    reference: FamilyReference, case: Case, prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, Any]:
    """The speculator of a case."""
    if case.kind.startswith("self"):
        width = 1 if case.kind == "self chain" else min(3, case.drafts)
        speculation = {"method": "draft_model", "model": reference.path, "max_branching": width}
        return speculation | {"num_speculative_tokens": case.drafts}
    return {
        "method": "adversarial_chain" if case.kind == "chain" else "adversarial",
        "num_speculative_tokens": case.drafts,
        "vocab_size": 64,
        "answers": {tuple(p): a for p, a in zip(prompts, answers, strict=True)},
        "use_masks": case.kind == "mask",
        "seed": 3,
    }


def drive(
    llm: LLM, models: list[FamilyReference], prompts: list[list[int]], sampling: list[SamplingParams], found: Found
) -> list[list[int]]:
    """Step an engine to its end; after each step compare every live request's slots in every layer."""
    core = llm.engine.core
    outputs: dict[str, list[int]] = {}
    for i, (prompt, param) in enumerate(zip(prompts, sampling, strict=True)):
        _, ids = llm._inputs.tokenise({"prompt_token_ids": prompt})
        core.add(llm._inputs.build(str(i), ids, param, 0))
        outputs[str(i)] = []
    while core.has_work:
        for update in core.step():
            outputs[update.request_id] += update.new_token_ids
        compare_live(core, models, found)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_total, "blocks leaked"
    return [outputs[str(i)] for i in range(len(prompts))]


def compare_live(core: Any, models: list[FamilyReference], found: Found) -> None:
    """Compare committed slots, as the device's own counts and tables name them, with the reference's caches."""
    state, size = core.runner.state, core.runner.state.block_size
    for request in core.scheduler.running:
        count = int(state.num_computed_tokens[request.req_idx])
        if count == 0:
            continue
        run = models[0].prefix(state.token_history[request.req_idx, :count].tolist())
        index = torch.arange(count)
        slots = state.block_tables[request.req_idx, index // size] * size + index % size
        held, worst = iter(core.runner.cache.layers), 0.0
        for _ in models:
            for expected in run.caches:
                for ours, whole in zip(next(held), expected, strict=True):
                    theirs = whole[:count]
                    worst = max(worst, float((ours[slots] - theirs).abs().max() / theirs.abs().max()))
        if worst > TOLERANCE and run.router_gap <= ROUTER_GAP:
            found.excused += 1
        else:
            found.worst = max(found.worst, worst)
        found.compared += count
