"""Drawing and accepting against loops: which rows are kept, which tokens that commits."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from tree_oracles import Forest, as_int64, forests, path_to, probe_case, property_settings

from specround.contract import AcceptResult, VerifyPlan
from specround.kernels.acceptance.naive import SampledRows, accept_chain, accept_tree, draw_tokens
from specround.kernels.acceptance.philox import gumbel_noise
from specround.kernels.tree import committable_rows, tree_tables


def matching_paths(parents: list[int], tokens: list[int], used: int, allowed: list[bool], drawn: list[int]) -> list:
    """Every path of allowed rows from the root on which each draft is the token drawn at its parent."""
    found = []
    for column in range(used):
        path = path_to(parents, column)
        agrees = all(tokens[child] == drawn[parent] for parent, child in pairwise(path))
        if agrees and all(allowed[row] for row in path):
            found.append(path)
    return found


def best_path(paths: list[list[int]]) -> list[int]:
    """The longest path; among equally long ones that of the lowest column."""
    return max(paths, key=lambda path: (len(path), -path[-1]), default=[])


def result_errors(result: AcceptResult, paths: list[list[int]], drawn: Tensor) -> int:
    """Requests whose path, count or tokens differ from the wanted paths, padding included."""
    errors, columns = 0, drawn.shape[1]
    for r, path in enumerate(paths):
        padding = [-1] * (columns - len(path))
        right = result.path[r].tolist() == path + padding
        right &= int(result.num_committed[r]) == len(path)
        right &= result.token_ids[r].tolist() == [int(drawn[r, column]) for column in path] + padding
        errors += not right
    return errors


def plan_case(forest: Forest, seed: int, vocabulary: int) -> tuple[VerifyPlan, Tensor]:
    """A plan over a tiny vocabulary, so that paths match often, and draws that are garbage where unused."""
    rng = random.Random(seed)
    columns = len(forest.parents[0])
    tokens = [[rng.randrange(vocabulary) if c < used else -1 for c in range(columns)] for used in forest.used]
    drawn = [
        [rng.randrange(vocabulary) if c < used else rng.choice([-1, 0, 10**6]) for c in range(columns)]
        for used in forest.used
    ]
    parents = forest.tensor if columns <= 64 else None
    return VerifyPlan(torch.tensor(tokens), torch.tensor(forest.used, dtype=torch.int32), parents), torch.tensor(drawn)


@given(forests(), st.integers(0, 2**32), st.integers(1, 3), st.booleans())
@property_settings(100)
def test_trees_keep_the_longest_matching_path(forest: Forest, seed: int, vocabulary: int, probes: bool) -> None:
    """Ragged trees, no candidates, one candidate, equal siblings, probes: the path is the enumerated best one."""
    plan, drawn = plan_case(forest, seed, vocabulary)
    tables = tree_tables(forest.tensor)
    visible, positions = probe_case(forest, seed, with_positions=seed % 2 == 0) if probes else (None, None)
    bits = tables.ancestors if visible is None else torch.tensor([[as_int64(seen) for seen in row] for row in visible])
    offsets = None if positions is None else torch.tensor(positions, dtype=torch.int32)
    allowed = committable_rows(tables, bits, offsets)
    result = accept_tree(plan, tables, allowed, drawn)
    assert (result.path.dtype, result.num_committed.dtype) == (torch.int32, torch.int32)
    wanted = [
        best_path(matching_paths(parents, plan.token_ids[r].tolist(), used, allowed[r].tolist(), drawn[r].tolist()))
        for r, (parents, used) in enumerate(zip(forest.parents, forest.used, strict=True))
    ]
    assert result_errors(result, wanted, drawn) == 0


def one_tree(tokens: list[int], parents: list[int], drawn: list[int], probes: tuple[int, ...] = ()) -> list[int]:
    """The path that acceptance keeps in one tree; probes hide an ancestor."""
    forest = Forest([parents], [len(parents)])
    tables = tree_tables(forest.tensor)
    bits = tables.ancestors.clone()
    for column in probes:
        bits[0, column] = 1 << column
    plan = VerifyPlan(torch.tensor([tokens]), torch.tensor([len(parents)], dtype=torch.int32), forest.tensor)
    result = accept_tree(plan, tables, committable_rows(tables, bits, None), torch.tensor([drawn]))
    return [column for column in result.path[0].tolist() if column >= 0]


def test_equal_siblings_are_followed_to_the_longest_path() -> None:
    """Two children hold the drawn token and only the second goes on: descending into the first would stop early."""
    tokens, parents, drawn = [9, 5, 5, 7], [-1, 0, 0, 2], [5, 7, 7, 1]
    assert one_tree(tokens, parents, drawn) == [0, 2, 3]
    first_match = [0, 1]
    assert best_path(matching_paths(parents, tokens, 4, [True] * 4, drawn)) != first_match


def test_ties_go_to_the_lowest_column() -> None:
    """Equal siblings and equally long paths: the lowest last column is kept, also when it is under a later sibling."""
    assert one_tree([9, 5, 5], [-1, 0, 0], [5, 7, 7]) == [0, 1]
    assert one_tree([9, 5, 5, 7, 7], [-1, 0, 0, 2, 1], [5, 7, 7, 1, 1]) == [0, 2, 3]


def test_probes_and_their_children_are_never_accepted() -> None:
    """A probe that matches is left out, with everything under it; without the probe mark it is kept (control)."""
    tokens, parents, drawn = [9, 5, 7, 3], [-1, 0, 1, 2], [5, 7, 3, 1]
    assert one_tree(tokens, parents, drawn) == [0, 1, 2, 3]
    assert one_tree(tokens, parents, drawn, probes=(2,)) == [0, 1]
    assert one_tree(tokens, parents, drawn, probes=(1,)) == [0]


@given(st.integers(1, 100), st.integers(0, 2**32), st.integers(1, 3))
@property_settings(60)
def test_chains_keep_the_longest_agreeing_prefix(columns: int, seed: int, vocabulary: int) -> None:
    """Chains of any length, also beyond 64 columns, ragged; up to 64, the same tree gives the same three tensors."""
    rng = random.Random(seed)
    used = [rng.choice([columns, rng.randrange(columns + 1), 0, 1]) for _ in range(4)]
    chain = list(range(-1, columns - 1))
    forest = Forest([chain] * 4, used)
    plan, drawn = plan_case(forest, seed, vocabulary)
    result = accept_chain(VerifyPlan(plan.token_ids, plan.num_candidates), drawn)
    wanted = [
        best_path(matching_paths(chain, plan.token_ids[r].tolist(), n, [True] * columns, drawn[r].tolist()))
        for r, n in enumerate(used)
    ]
    assert result_errors(result, wanted, drawn) == 0
    if columns <= 64:
        tables = tree_tables(forest.tensor)
        as_tree = accept_tree(plan, tables, committable_rows(tables, tables.ancestors, None), drawn)
        for name in ("path", "num_committed", "token_ids"):
            assert torch.equal(getattr(as_tree, name), getattr(result, name))


def test_the_path_check_sees_wrong_results() -> None:
    """Negative control: a path, a count or a bonus off by one is found."""
    drawn = torch.tensor([[5, 7, 1]])
    good = AcceptResult(torch.tensor([[0, 1, -1]]), torch.tensor([2]), torch.tensor([[5, 7, -1]]))
    assert result_errors(good, [[0, 1]], drawn) == 0
    assert result_errors(good, [[0, 2]], drawn) == 1
    assert result_errors(AcceptResult(good.path, torch.tensor([1]), good.token_ids), [[0, 1]], drawn) == 1
    assert result_errors(AcceptResult(good.path, good.num_committed, good.token_ids + 1), [[0, 1]], drawn) == 1


def test_greedy_rows_take_the_first_largest_logit() -> None:
    """Greedy drawing is argmax with ties to the lowest id."""
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -1.0, -1.0], [float("-inf"), -5.0, float("-inf")]])
    assert draw_tokens(logits, None).tolist() == [1, 0, 1]


def test_sampled_rows_add_their_own_noise_and_greedy_rows_none() -> None:
    """A sampled row is argmax of logits + noise of its seed and token index; greedy rows beside it stay greedy."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(60, 17, generator=generator)
    rows = torch.randperm(60, generator=generator)[:30]
    seeds, index = torch.arange(30) * 7 - 100, 2**33 + torch.arange(30)
    found = draw_tokens(logits, SampledRows(rows, seeds, index))
    noise = gumbel_noise(seeds, index, 17)
    wanted = logits.argmax(-1)
    for m, row in enumerate(rows.tolist()):
        wanted[row] = (logits[row] + noise[m]).argmax()
    assert torch.equal(found, wanted)
    assert int((found != logits.argmax(-1)).sum()) > 5
    assert not torch.equal(found[rows], (logits[:30] + noise).argmax(-1))
    alone = draw_tokens(logits[rows[4:5]], SampledRows(torch.tensor([0]), seeds[4:5], index[4:5]))
    assert int(alone) == int(found[rows[4]])


def test_a_noise_scale_of_zero_is_greedy() -> None:
    """Greedy is zero noise: rows with scale 0 equal argmax, rows with scale 1 equal the unscaled draw, bit for bit."""
    logits = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    rows, seeds, index = torch.arange(40), torch.arange(40), torch.arange(40) + 5
    drawn = draw_tokens(logits, SampledRows(rows, seeds, index))
    scale = torch.tensor([0.0, 1.0] * 20)
    mixed = draw_tokens(logits, SampledRows(rows, seeds, index, scale))
    assert torch.equal(mixed, torch.where(scale == 0, logits.argmax(-1), drawn))


@pytest.mark.parametrize("mass", [0.5, 1e-3])
def test_masked_tokens_are_never_drawn(mass: float) -> None:
    """A token of zero mass is not drawn in 10^5 draws, however small the mass of the others."""
    logits = torch.tensor([0.0, mass, 1 - mass, 0.0, 0.0]).log()
    seeds = torch.arange(100_000)
    rows = SampledRows(seeds, seeds, torch.full_like(seeds, 7))
    drawn = draw_tokens(logits.expand(100_000, 5), rows)
    assert set(drawn.unique().tolist()) == {1, 2}


def test_a_step_without_requests_is_empty() -> None:
    """No requests: acceptance returns empty tensors of the right shapes."""
    plan = VerifyPlan(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    parents = torch.zeros(0, 3, dtype=torch.int32)
    tables = tree_tables(parents)
    nothing = torch.zeros(0, 3, dtype=torch.int64)
    tree = VerifyPlan(plan.token_ids, plan.num_candidates, parents)
    for result in (accept_chain(plan, nothing), accept_tree(tree, tables, nothing.bool(), nothing)):
        assert (result.path.shape, result.num_committed.shape) == ((0, 3), (0,))
