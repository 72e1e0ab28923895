"""A chain drafter that leaves the plan to the engine: only leading drafts are verified, -1 never reaches the model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from plain_reference import Ask, PlainReference, Tally, check_at_rest
from scripted import scripted

from specround import LLM
from specround.contract import PlanError, ProposeView, SpeculatorError

ASKS = [Ask((3 + n, 4, 5)[: 1 + n % 3], 14, (0.0, 0.8)[n % 2], seed=n) for n in range(6)]
Draw = Callable[[random.Random], list[int]]


def drafting(draw: Draw) -> Callable[[object, ProposeView], None]:
    """A `propose` that writes a drawn row for every request."""
    rng = random.Random(4)

    def propose(_: object, view: ProposeView) -> None:
        rows = torch.tensor([draw(rng) for _ in range(len(view.req_idx))])
        view.draft_token_ids.index_copy_(0, view.req_idx, rows)

    return propose


def ragged(rng: random.Random) -> list[int]:
    count = rng.randint(0, 5)
    return [rng.randrange(24) for _ in range(count)] + [-1] * (5 - count)


def holed(rng: random.Random) -> list[int]:
    return [rng.choice((-1, 3, 5, 7)) for _ in range(5)]


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize("draw", [ragged, holed, lambda _: [-1] * 5], ids=["ragged", "holed", "empty"])
def test_only_leading_drafts_are_verified(draw: Draw, late: bool, target: PlainReference) -> None:
    """Fewer drafts than rows, drafts behind a -1, or none: only the leading ones are run, and tokens stay plain."""
    seen: list[tuple[int, list[int]]] = []

    def accept(_: object, plan: object, output: object) -> None:
        seen.extend(zip(plan.num_candidates.tolist(), plan.token_ids.tolist(), strict=True))

    llm = LLM(target.path, scripted(5, propose=drafting(draw), accept=accept), async_scheduling=late)
    outputs = llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    tally = Tally()
    for ask, output in zip(ASKS, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()
    check_at_rest(llm)
    assert len(seen) > 20
    for count, row in seen:
        assert -1 not in row[:count], "an unused draft was verified"
    assert sum(output.metrics.drafted for output in outputs) == sum(max(0, count - 1) for count, _ in seen) or late


@pytest.mark.parametrize("token", [24, 10**9])
def test_a_draft_beyond_the_vocabulary_is_refused(token: int, target: PlainReference) -> None:
    """The error names the hook that wrote it, and the value."""
    llm = LLM(target.path, scripted(5, propose=drafting(lambda _: [3, token, 4, 5, 6])))
    with pytest.raises(SpeculatorError, match=f"column 2: token_ids={token}: must be below 24") as caught:
        llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    assert caught.value.hook == "propose"
    assert isinstance(caught.value.__cause__.__cause__, PlanError)
    assert llm.engine.core.scheduler.pool.num_free == llm.engine.core.scheduler.pool.num_total
