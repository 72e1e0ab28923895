"""Tree tables against loops over plain Python lists: depths, ancestor bits, masks, words, committable rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import (
    Forest,
    ancestors_of,
    as_int64,
    bit_set,
    depth_of,
    forests,
    path_to,
    probe_case,
    property_settings,
)

from specround.kernels.tree import (
    TreeTables,
    column_bits,
    committable_rows,
    has_bit,
    mask_bits,
    pack_words,
    tree_tables,
)


def table_errors(tables: TreeTables, forest: Forest) -> int:
    """Used columns whose depth or ancestors are wrong."""
    errors = 0
    for r, parents in enumerate(forest.parents):
        for column in range(forest.used[r]):
            right_depth = int(tables.depth[r, column]) == depth_of(parents, column)
            right_bits = bit_set(int(tables.ancestors[r, column])) == ancestors_of(parents, column)
            errors += not (right_depth and right_bits)
    return errors


@given(forests(garbage=True))
@property_settings(60)
def test_depths_and_ancestors_equal_a_walk_to_the_root(forest: Forest) -> None:
    """Pointer jumping finds every ancestor of every used column, whatever unused columns hold."""
    tables = tree_tables(forest.tensor)
    assert tables.depth.dtype == torch.int32
    assert tables.ancestors.dtype == torch.int64
    assert table_errors(tables, forest) == 0


@pytest.mark.parametrize("columns", range(1, 65))
def test_chains_of_every_length_reach_the_root(columns: int) -> None:
    """The number of doublings suffices for the deepest tree of each size, and the sign bit is an ordinary column."""
    parents = list(range(-1, columns - 1))
    assert table_errors(tree_tables(torch.tensor([parents])), Forest([parents], [columns])) == 0


def test_the_table_check_sees_a_missing_doubling_and_a_wrong_parent() -> None:
    """Negative control: one doubling too few, and a tree read as a chain, are both found."""

    def one_doubling_short(parents: torch.Tensor) -> TreeTables:
        jump = parents.to(torch.int64)
        bits = column_bits(parents.shape[1], parents.device).expand_as(jump)
        depth = (jump >= 0).to(torch.int32)
        for _ in range((parents.shape[1] - 1).bit_length() - 1):
            live, target = jump >= 0, jump.clamp(min=0)
            bits = bits | torch.where(live, bits.gather(1, target), 0)
            depth = depth + torch.where(live, depth.gather(1, target), 0)
            jump = torch.where(live, jump.gather(1, target), -1)
        return TreeTables(depth, bits)

    chain = Forest([list(range(-1, 63))], [64])
    assert table_errors(one_doubling_short(chain.tensor), chain) > 0
    star = Forest([[-1] + [0] * 7], [8])
    assert table_errors(tree_tables(torch.tensor([list(range(-1, 7))])), star) == 6


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 63, 64])
def test_mask_bits_read_the_strict_lower_triangle_and_the_row_itself(columns: int) -> None:
    """Upper triangle and diagonal of a mask are ignored; a row always sees itself, also in the sign bit."""
    mask = torch.rand(3, columns, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    bits = mask_bits(mask)
    for r in range(3):
        for i in range(columns):
            assert bit_set(int(bits[r, i])) == {j for j in range(i) if mask[r, i, j]} | {i}
    full = mask_bits(torch.ones(1, columns, columns, dtype=torch.bool))
    assert bit_set(int(full[0, -1])) == set(range(columns))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8), st.integers(1, 64))
@property_settings(60)
def test_words_are_the_bits_low_columns_first(values: list[int], columns: int) -> None:
    """Packing into int32 words keeps each of the first 32 * words bits, sign bits of both words included."""
    words = pack_words(torch.tensor(values), columns)
    assert words.dtype == torch.int32
    assert words.shape == (len(values), -(-columns // 32))
    for value, row in zip(values, words.tolist(), strict=True):
        unsigned = sum((word % 2**32) << (32 * place) for place, word in enumerate(row))
        assert unsigned == value % 2 ** (32 * len(row))


@pytest.mark.parametrize(("column", "word", "value"), [(31, 0, -(2**31)), (32, 1, 1), (63, 1, -(2**31))])
def test_sign_bits_of_words(column: int, word: int, value: int) -> None:
    """Column 31 is the sign of word 0 and column 63 the sign of word 1; neither leaks into another column."""
    words = pack_words(torch.tensor([as_int64({column})]), 64)[0].tolist()
    assert words[word] == value
    assert words[1 - word] == 0
    assert pack_words(torch.tensor([as_int64(set(range(64)))]), 64)[0].tolist() == [-1, -1]


def unmasked_has_bit(bits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The pitfall: a shift that carries the sign, compared without masking."""
    return (bits >> columns.clamp(0, 63)) != 0


def bit_errors(check: object, values: list[int]) -> int:
    """Disagreements between a bit test and Python sets over columns -70 .. 130."""
    columns = torch.arange(-70, 131)
    found = check(torch.tensor(values)[:, None], columns[None])
    errors = 0
    for row, value in zip(found.tolist(), values, strict=True):
        wanted = [column in bit_set(value) for column in columns.tolist()]
        errors += sum(have != want for have, want in zip(row, wanted, strict=True))
    return errors


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6))
@property_settings(40)
def test_has_bit_equals_set_membership(values: list[int]) -> None:
    """A bit test is right for all 64 columns of any word, negative ones included, and false outside them."""
    assert bit_errors(has_bit, values) == 0


def test_the_bit_check_sees_a_carried_sign() -> None:
    """Negative control: an arithmetic shift without a mask reports columns that are not set."""
    assert bit_errors(has_bit, [as_int64({63})]) == 0
    assert bit_errors(unmasked_has_bit, [as_int64({63})]) > 60


def committable_errors(found: torch.Tensor, forest: Forest, visible: list[list[set[int]]], positions: object) -> int:
    """Used columns on which the answer differs from the definition, read literally."""
    errors = 0
    for r, parents in enumerate(forest.parents):
        for column in range(forest.used[r]):
            wanted = True
            for row in path_to(parents, column):
                wanted &= visible[r][row] == ancestors_of(parents, row)
                if positions is not None:
                    wanted &= positions[r][row] == depth_of(parents, row)
            errors += bool(found[r, column]) != wanted
    return errors


@given(forests(), st.integers(0, 2**32), st.booleans())
@property_settings(60)
def test_committable_rows_equal_the_definition(forest: Forest, seed: int, with_positions: bool) -> None:
    """A row is committable only if it and every ancestor see exactly their ancestors and sit at their depth."""
    visible, positions = probe_case(forest, seed, with_positions)
    bits = torch.tensor([[as_int64(seen) for seen in row] for row in visible])
    offsets = None if positions is None else torch.tensor(positions, dtype=torch.int32)
    found = committable_rows(tree_tables(forest.tensor), bits, offsets)
    assert committable_errors(found, forest, visible, positions) == 0


def test_the_committable_check_sees_a_probe_above_a_row() -> None:
    """Negative control: looking at the row alone calls the child of a probe committable."""
    forest = Forest([[-1, 0, 1, 2]], [4])
    tables = tree_tables(forest.tensor)
    visible = [[{0}, {1}, {0, 1, 2}, {0, 1, 2, 3}]]
    bits = torch.tensor([[as_int64(seen) for seen in visible[0]]])
    assert committable_rows(tables, bits, None).tolist() == [[True, False, False, False]]
    assert committable_errors(bits == tables.ancestors, forest, visible, None) == 2
