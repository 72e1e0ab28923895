"""The law of `match`: texts follow the target's law and equal plain decoding, whatever the drafter does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from match_rounds import (
    EMITTED,
    Round,
    V,
    by_row,
    by_row_and_index,
    emit,
    joint_law,
    match,
    random_laws,
    z_score,
)
from torch import Tensor

from specround.contract import AcceptResult
from specround.kernels.acceptance.naive import SampledRows, draw_tokens
from specround.kernels.acceptance.philox import STREAM_COIN, uniform_noise

DRAWS = 100_000
FEWER = 30_000
CHILDREN = ["uniform", "best", "duplicates", "drawn", "shared noise"]


@cache
def plain(seed: int, requests: int) -> Tensor:
    """Texts of plain decoding: one row per step."""
    return emit(random_laws(seed), requests, "uniform", columns=1)[0]


def test_plain_decoding_follows_the_target() -> None:
    """Gumbel-max with the contract's noise draws from the product law over 10^5 seeds, zero-mass tokens never."""
    assert abs(z_score(plain(0, DRAWS), joint_law(random_laws(0).target))) < 4


@pytest.mark.parametrize(
    ("children", "draws"),
    [("uniform", DRAWS), ("shared noise", DRAWS), ("best", FEWER), ("duplicates", FEWER), ("drawn", FEWER)],
)
def test_trees_emit_the_target_law_and_the_plain_text(children: str, draws: int) -> None:
    """Random ragged trees with any children: the joint law of three tokens is the target's and each text is plain's.

    Children are arbitrary, duplicated, drawn from the drafter, or drawn with the same noise as the target's tokens.
    """
    laws = random_laws(0)
    tokens, per_round = emit(laws, draws, children)
    assert abs(z_score(tokens, joint_law(laws.target))) < 4
    assert torch.equal(tokens, plain(0, draws))
    assert per_round > 1.2


@pytest.mark.parametrize("laws_seed", [1, 2, 3])
@pytest.mark.parametrize("columns", [2, 4, 9])
def test_any_tree_emits_the_plain_text(laws_seed: int, columns: int) -> None:
    """Exactly the same tokens as plain decoding for other laws and other trees, wide and narrow."""
    for children in CHILDREN:
        tokens, _ = emit(random_laws(laws_seed), 3000, children, columns=columns)
        assert torch.equal(tokens, plain(laws_seed, 3000))


def keep(state: Round, accepted: Tensor) -> AcceptResult:
    """The result of a rule that marks at most one accepted child per accepted row."""
    requests, columns = accepted.shape
    depth = torch.where(accepted, state.tables.depth.to(torch.int64), columns)
    path = torch.full((requests, columns + 1), -1)
    path.scatter_(1, depth, torch.arange(columns).expand_as(depth))
    path = path[:, :columns]
    child = torch.cat([path[:, 1:], torch.full((requests, 1), -1)], 1).clamp(min=0)
    count = accepted.sum(1)
    last = torch.arange(columns) == count[:, None] - 1
    bonus, drafts = state.drawn.gather(1, path.clamp(min=0)), state.plan.token_ids.gather(1, child)
    tokens = torch.where(path < 0, -1, torch.where(last, bonus, drafts))
    return AcceptResult(path, count, tokens)


def walk(state: Round, wants: Tensor) -> AcceptResult:
    """Accept in column order every child that `wants` marks, one per row, under accepted parents."""
    requests, columns = wants.shape
    request = torch.arange(requests)
    accepted, taken = torch.zeros(2, requests, columns, dtype=torch.bool)
    accepted[:, 0] = state.plan.num_candidates > 0
    for column in range(1, columns):
        parent = state.plan.parents[:, column].to(torch.int64)
        free = accepted[request, parent] & ~taken[request, parent]
        accepted[:, column] = free & wants[:, column] & (column < state.plan.num_candidates)
        taken[request, parent] |= accepted[:, column]
    return keep(state, accepted)


def parent_law(state: Round, laws: Tensor) -> Tensor:
    """`[R, C]` mass that the parent's law gives to each column's token."""
    parents = state.plan.parents.to(torch.int64).clamp(min=0)
    at_parent = laws.gather(1, parents[:, :, None].expand_as(laws))
    return at_parent.gather(2, state.plan.token_ids.clamp(max=V - 1)[:, :, None])[:, :, 0]


def ratio_test(state: Round) -> AcceptResult:
    """Wrong: the ratio test of rejection sampling on children that were not drawn from the drafter."""
    coins = uniform_noise(state.seeds, state.root_index, state.drawn.shape[1], STREAM_COIN)
    return walk(state, coins * parent_law(state, state.draft_laws) < parent_law(state, state.laws))


def fresh_draws(state: Round) -> AcceptResult:
    """Wrong: siblings' noise is not shared: each child is compared with a new draw at its parent."""
    requests, columns = state.drawn.shape
    parents = state.plan.parents.to(torch.int64).clamp(min=0)
    logits = state.logits.gather(1, parents[:, :, None].expand_as(state.logits)).flatten(0, 1)
    own = state.seeds[:, None] + 2**40 * (1 + torch.arange(columns))
    index = (state.root_index[:, None] + state.tables.depth).flatten()
    drawn = draw_tokens(logits, SampledRows(torch.arange(len(logits)), own.flatten(), index)).view(requests, columns)
    return walk(state, state.plan.token_ids == drawn)


def bonus_of_the_root(state: Round) -> AcceptResult:
    """Wrong: the last token comes from the root's row instead of the path's last row."""
    result = match(state)
    last = torch.arange(state.drawn.shape[1]) == result.num_committed[:, None] - 1
    return replace(result, token_ids=torch.where(last, state.drawn[:, :1], result.token_ids))


CONTROLS = {
    "ratio test on the best children": {"children": "best", "rule": ratio_test},
    "a fresh draw for each sibling": {"children": "best", "rule": fresh_draws},
    "bonus from the root's row": {"children": "best", "rule": bonus_of_the_root},
    "noise keyed by row": {"children": "best", "keying": by_row, "columns": 9},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_biased_rules_fail_by_far(name: str) -> None:
    """Negative control: each wrong rule is more than 30 standard deviations off and changes texts."""
    laws = random_laws(0)
    tokens, _ = emit(laws, FEWER, **CONTROLS[name])
    assert z_score(tokens, joint_law(laws.target)) > 30
    assert not torch.equal(tokens, plain(0, FEWER))


def test_noise_of_its_own_for_every_row_keeps_the_law_but_not_the_text() -> None:
    """Negative control of the equality: unshared sibling noise is lossless, yet the seeded text depends on the tree."""
    laws = random_laws(0)
    tokens, _ = emit(laws, FEWER, "uniform", keying=by_row_and_index)
    assert abs(z_score(tokens, joint_law(laws.target))) < 4
    assert float((tokens != plain(0, FEWER)).any(1).double().mean()) > 0.05


def test_the_walk_of_the_controls_is_sound() -> None:
    """The controls' own bookkeeping is not what fails: walking along the right marks gives the built-in result."""
    laws = random_laws(0)

    def marked(state: Round) -> AcceptResult:
        parents = state.plan.parents.to(torch.int64).clamp(min=0)
        return walk(state, state.plan.token_ids == state.drawn.gather(1, parents))

    tokens, _ = emit(laws, 5000, "uniform", rule=marked)
    assert torch.equal(tokens, plain(0, 5000))
    assert tokens.shape == (5000, EMITTED)


def test_the_chi_square_sees_a_small_bias() -> None:
    """The statistic is sharp: moving 1 % of the mass between two tokens exceeds the bound at 10^5 draws."""
    laws = random_laws(0)
    law = joint_law(laws.target)
    top = law.sum((1, 2)).argsort(descending=True)
    tilted = laws.target.clone()
    tilted[V, V, top[0]] -= 0.01
    tilted[V, V, top[1]] += 0.01
    assert abs(z_score(plain(0, DRAWS), joint_law(tilted))) > 4
