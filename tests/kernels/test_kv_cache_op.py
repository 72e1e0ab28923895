"""Writing keys and values to paged slots, and moving accepted paths to chain slots, against loops."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import BLOCK, commit_errors, moves_of, shuffled_tables
from tree_oracles import path_to, property_settings, trees

from specround.kernels.kv_cache.naive import commit_kv, slots_of, write_kv


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**32))
@property_settings(60)
def test_slots_follow_ragged_block_tables(lengths: list[int], seed: int) -> None:
    """Token i of a request is in slot `table[i // size] * size + i % size`; invalid tokens are in the null slot."""
    rng = random.Random(seed)
    tables, _ = shuffled_tables(lengths, rng)
    index = torch.tensor([[rng.randrange(-5, 60) for _ in range(12)] for _ in lengths])
    valid = torch.tensor(
        [[0 <= i < n and rng.random() < 0.8 for i in row] for row, n in zip(index.tolist(), lengths, strict=True)]
    )
    found = slots_of(tables, index, BLOCK, valid)
    assert found.dtype == torch.int64
    for r in range(len(lengths)):
        for x in range(12):
            i = int(index[r, x])
            wanted = int(tables[r, i // BLOCK]) * BLOCK + i % BLOCK if valid[r, x] else 0
            assert int(found[r, x]) == wanted
    assert torch.equal(slots_of(tables, index.to(torch.int32), BLOCK, valid), found)


def test_slots_of_different_tokens_are_different() -> None:
    """No two tokens of a batch share a slot, and none is in the null block."""
    lengths = [13, 1, 40, 4]
    tables, _ = shuffled_tables(lengths, random.Random(1))
    index = torch.arange(40).expand(4, 40)
    valid = index < torch.tensor(lengths)[:, None]
    slots = slots_of(tables, index, BLOCK, valid)[valid].tolist()
    assert len(set(slots)) == sum(lengths)
    assert min(slots) >= BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_writes_reach_their_slots_and_padding_leaves_the_null_block_zero(dtype: torch.dtype, poison: float) -> None:
    """Rows go to their slots and nowhere else; poisoned padding rows, in any number, leave zeros in the null block."""
    generator = torch.Generator().manual_seed(0)
    key_cache, value_cache = torch.full((24, 2, 3), float("nan")), torch.full((24, 2, 5), float("nan"))
    key_cache, value_cache = key_cache.to(dtype), value_cache.to(dtype)
    key_cache[:BLOCK], value_cache[:BLOCK] = 0, 0
    key, value = torch.randn(7, 2, 3, generator=generator), torch.randn(7, 2, 5, generator=generator)
    slots = torch.tensor([9, 0, 4, 23, 0, 0, 11])
    key[slots == 0], value[slots == 0] = poison, poison
    write_kv(key_cache, value_cache, key, value, slots)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[:BLOCK], torch.zeros_like(cache[:BLOCK]))
        for slot in range(BLOCK, 24):
            at = (slots == slot).nonzero().flatten()
            if at.numel():
                assert torch.equal(cache[slot], rows[int(at)].to(dtype))
            else:
                assert cache[slot].isnan().all()


def test_a_write_without_selection_poisons_the_null_block() -> None:
    """Negative control: multiplying padding by zero instead of selecting leaves NaN, so the poison is a real test."""
    cache, slots = torch.zeros(8, 1, 2), torch.tensor([5, 0])
    key = torch.tensor([[[1.0, 2.0]], [[float("nan"), float("inf")]]])
    cache.index_copy_(0, slots, key * (slots != 0)[:, None, None])
    assert cache[0].isnan().all()


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 2**32))
@property_settings(60)
def test_commit_leaves_what_a_chain_would_have_left(forest: list[list[int]], seed: int) -> None:
    """Random paths of random trees: every layer's path rows stand in the chain's slots, bit for bit.

    Ranges overlap, tables are shuffled and ragged, requests start anywhere; every other slot keeps its bits.
    """
    rng = random.Random(seed)
    roots = [rng.randrange(20) for _ in forest]
    tables, blocks = shuffled_tables([root + len(tree) for root, tree in zip(roots, forest, strict=True)], rng)
    paths = [path_to(tree, rng.randrange(len(tree))) for tree in forest]
    generator = torch.Generator().manual_seed(seed)
    caches = [
        torch.randn(3, blocks * BLOCK, 2, 3, generator=generator),
        torch.randn(1, blocks * BLOCK, 5, generator=generator),
    ]
    before = [cache.clone() for cache in caches]
    source, target = moves_of(paths, roots, tables, max(map(len, forest)))
    commit_kv(caches, source, target)
    for cache, old in zip(caches, before, strict=True):
        assert commit_errors(cache, old, paths, roots, tables) == 0


def test_commit_order_is_seen() -> None:
    """Negative control: moving rows one by one from the path's end overwrites rows that are still to be read."""
    paths, roots = [[0, 2, 3, 5, 6]], [3]
    tables, blocks = shuffled_tables([3 + 7], random.Random(0))
    before = torch.randn(2, blocks * BLOCK, 3, generator=torch.Generator().manual_seed(0))
    source, target = moves_of(paths, roots, tables, 7)
    backwards = before.clone()
    for i in reversed(range(source.numel())):
        backwards[:, target[i]] = backwards[:, source[i]]
    assert commit_errors(backwards, before, paths, roots, tables) > 0
    scatter_first = before.clone()
    scatter_first[:, target] = 0
    scatter_first[:, target] = scatter_first[:, source]
    assert commit_errors(scatter_first, before, paths, roots, tables) > 0
    right = before.clone()
    commit_kv([right], source, target)
    assert commit_errors(right, before, paths, roots, tables) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_commit_moves_bits_of_any_storage_in_views(dtype: torch.dtype) -> None:
    """Nothing is converted: NaN payloads, negative zeros and integers move as they are, in strided caches too."""
    pool = torch.arange(2 * 12 * 3).reshape(2, 12, 3).to(dtype)
    if dtype.is_floating_point:
        pool[:, 7] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=dtype)
    old, view = pool.clone(), pool.transpose(0, 1).contiguous().transpose(0, 1)
    assert not view.is_contiguous()
    commit_kv([view], torch.tensor([7, 0, 8]), torch.tensor([5, 0, 7]))
    old[:, [5, 7]] = old[:, [7, 8]]
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.int8}[dtype]
    assert torch.equal(view.contiguous().view(bits), old.view(bits))


def test_commit_of_nothing_changes_nothing() -> None:
    """A step whose paths are chains moves only the null slot onto itself, and the null block stays zero."""
    cache = torch.randn(2, 12, 3)
    cache[:, :BLOCK] = 0
    old = cache.clone()
    commit_kv([cache], torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))
    assert torch.equal(cache, old)
