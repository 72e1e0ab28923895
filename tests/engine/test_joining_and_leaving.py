"""Requests join, leave, are aborted and preempted in every phase; nobody's tokens change and nothing is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from crowd import Crowd
from plain_reference import Ask
from speculator_fleet import FLEET, MAX_MODEL_LEN, VOCAB, Models

from specround import LLM


def visitors(seed: int, count: int) -> list[Ask]:
    """Distinct prompts of 1 to 12 tokens with outputs of 1 to 30."""
    rng = random.Random(seed)
    asks = {}
    while len(asks) < count:
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12)))
        asks.setdefault(prompt, Ask(prompt, rng.randint(1, 30), rng.choice((0.0, 0.8)), seed=rng.getrandbits(64)))
    return list(asks.values())


def run_crowd(name: str, late: bool, seed: int, models: Models) -> Crowd:
    """A crowd on a pool that runs out, with chunked prefill, already checked."""
    drafts, block_size = (3, 5)[seed % 2], (1, 4, 16)[seed % 3]
    asks = visitors(7, 24)
    llm = LLM(
        models.target.path,
        models.config(name, drafts, asks),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_blocks=-(-MAX_MODEL_LEN // block_size) + 24 // block_size,
        max_num_seqs=6,
        max_num_batched_tokens=7,
        async_scheduling=late,
    )
    crowd = Crowd(llm, asks, seed, abort_share=0.12)
    crowd.run()
    crowd.check(models.target)
    return crowd


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("name", FLEET)
def test_crowd(name: str, late: bool, models: Models) -> None:
    """Random arrivals and aborts on a pool that runs out, with chunked prefill: tokens are the plain ones."""
    run_crowd(name, late, FLEET.index(name) * 2 + late, models)


def test_crowds_meet_every_phase(models: Models) -> None:
    """Such crowds are no idle walk: they abort in every phase, run out of blocks, trim drafts and reuse ids."""
    crowds = [run_crowd("ngram", late, seed, models) for late, seed in ((True, 1), (True, 3), (False, 6), (False, 2))]
    aborted: Counter[str] = sum((Counter(crowd.aborted_in) for crowd in crowds), Counter())
    assert all(aborted[phase] > 0 for phase in ("waiting", "prefill", "decode", "in flight")), aborted
    schedulers = [crowd.core.scheduler for crowd in crowds]
    assert sum(scheduler.num_preemptions for scheduler in schedulers) >= 3
    assert sum(scheduler.num_trimmed_drafts for scheduler in schedulers) > 0
    assert sum(crowd.returned for crowd in crowds) > 0
