"""Chains longer than a tree may be wide: a chain has no limit of 64 columns, nor does the drafter's cache."""

from __future__ import annotations

import pytest
from plain_reference import Ask, PlainReference, Tally, check_at_rest

from specround import LLM

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
ASKS = [Ask((5, 9, 3), 205), Ask((7,), 150, 0.8, 11), Ask((4, 4, 8, 2, 6, 10), 120, 1.2, 2**63 + 5)]


@LATE
@pytest.mark.parametrize("drafts", [63, 70, 100])
def test_a_self_draft_of_many_columns_is_accepted_whole(drafts: int, late: bool, target: PlainReference) -> None:
    """The target drafts for itself in long chains: tokens are the plain ones and every draft is accepted."""
    config = {"method": "draft_model", "model": target.path, "num_speculative_tokens": drafts}
    llm = LLM(target.path, config, async_scheduling=late, max_model_len=224, block_size=16, max_num_seqs=3)
    outputs = llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    tally = Tally()
    for ask, output in zip(ASKS, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
        assert output.metrics.drafted >= drafts
        assert output.metrics.accepted == output.metrics.drafted
        assert output.metrics.rounds == 1 + -(-(ask.max_tokens - 1) // (drafts + 1)), "a prefill, then full blocks"
    tally.check(least=400)
    check_at_rest(llm)
