"""KV write and KV commit in Triton against the naive ops, bit for bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kv_cases import BLOCK, commit_errors, moves_of, shuffled_tables
from torch import Tensor
from tree_oracles import path_to

from specround.kernels.kv_cache import naive
from specround.kernels.kv_cache.triton import _MAX_BLOCK, commit_kv, write_kv

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN payloads included."""
    bits = BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.cpu().contiguous().view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(3, 5), (64, 80)])
def test_writes_are_the_naive_ones(dtype: torch.dtype, dims: tuple[int, int], device: torch.device) -> None:
    """Rows reach their slots in strided caches, cast to their type; poisoned padding rows leave every slot alone."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.full((24, 3, sum(dims)), float("nan"), dtype=dtype)
    pool[:BLOCK] = 0
    key, value = (torch.randn(3, 7, dim, generator=generator).transpose(0, 1) for dim in dims)
    slots = torch.tensor([9, 0, 4, 23, 0, 0, 11])
    key[slots == 0], value[slots == 0] = float("nan"), float("inf")
    wanted, found = pool.clone(), pool.clone().to(device)
    naive.write_kv(wanted[..., : dims[0]], wanted[..., dims[0] :], key, value, slots)
    write_kv(found[..., : dims[0]], found[..., dims[0] :], key.to(device), value.to(device), slots.to(device))
    assert same_bits(wanted, found)
    write_kv(found[..., : dims[0]], found[..., dims[0] :], key[:0], value[:0], slots[:0])
    assert same_bits(wanted, found)


@pytest.mark.parametrize("dims", [(1400, 5), (5, 1400), (2731, 1366)])
def test_wide_rows_are_written_whole(dims: tuple[int, int], device: torch.device) -> None:
    """Keys or values of more elements than are copied at a time reach their slots to the last element."""
    assert 3 * max(dims) > _MAX_BLOCK
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 3, dim, generator=generator) for dim in dims)
    slots = torch.tensor([9, 0, 4])
    wanted = [torch.full((12, 3, dim), float("nan")) for dim in dims]
    for cache in wanted:
        cache[:BLOCK] = 0
    found = [cache.to(device, copy=True) for cache in wanted]
    naive.write_kv(*wanted, key, value, slots)
    write_kv(*found, key.to(device), value.to(device), slots.to(device))
    assert all(map(same_bits, wanted, found))


def test_slots_may_be_a_column(device: torch.device) -> None:
    """Slots further apart than one element; what lies between them names other slots, which stay poisoned."""
    wide = torch.tensor([[9, 13], [0, 14], [4, 15], [11, 16]]).to(device)
    slots = wide[:, 0]
    assert slots.stride() == (2,)
    key, value = (torch.randn(4, 2, dim, generator=torch.Generator().manual_seed(0)) for dim in (3, 5))
    wanted = [torch.full((20, 2, dim), float("nan")) for dim in (3, 5)]
    for cache in wanted:
        cache[:BLOCK] = 0
    found = [cache.to(device, copy=True) for cache in wanted]
    naive.write_kv(*wanted, key, value, slots.cpu())
    write_kv(*found, key.to(device), value.to(device), slots)
    assert all(map(same_bits, wanted, found))


@pytest.mark.parametrize("seed", range(4))
def test_commits_leave_what_a_chain_would_have_left(seed: int, device: torch.device) -> None:
    """Random paths of random trees, overlapping ranges, ragged tables, several layers and ranks of tensors."""
    rng = random.Random(seed)
    forest = [[-1] + [rng.randrange(c) for c in range(1, rng.choice([1, 5, 17, 40]))] for _ in range(3)]
    roots = [rng.randrange(20) for _ in forest]
    tables, blocks = shuffled_tables([root + len(tree) for root, tree in zip(roots, forest, strict=True)], rng)
    paths = [path_to(tree, rng.randrange(len(tree))) for tree in forest]
    shapes = [(2, blocks * BLOCK, 2, 3), (1, blocks * BLOCK, 5), (2, blocks * BLOCK), (1, blocks * BLOCK, 2, 2, 3)]
    before = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape in shapes]
    source, target = moves_of(paths, roots, tables, max(map(len, forest)))
    caches = [cache.clone().to(device) for cache in before]
    commit_kv(caches, source.to(device), target.to(device))
    for cache, old in zip(caches, before, strict=True):
        wide = (cache.cpu(), old) if cache.ndim > 2 else (cache.cpu()[..., None], old[..., None])
        assert commit_errors(*wide, paths, roots, tables) == 0


def test_an_order_that_overwrites_sources_is_right(device: torch.device) -> None:
    """A chain of moves in which every target is the next move's source: all sources are read first."""
    cache = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    source, target = torch.arange(4, 38), torch.arange(5, 39)
    wanted, found = cache.clone(), cache.clone().to(device)
    naive.commit_kv([wanted], source, target)
    commit_kv([found], source.to(device), target.to(device))
    assert torch.equal(wanted, found.cpu())
    one_by_one = cache.clone()
    for at, to in zip(source.tolist(), target.tolist(), strict=True):
        one_by_one[:, to] = one_by_one[:, at]
    assert not torch.equal(wanted, one_by_one), "the order matters (control)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_commit_moves_bits_of_any_storage_in_views(dtype: torch.dtype, device: torch.device) -> None:
    """Nothing is converted: NaN payloads, negative zeros and integers move as they are, in strided caches too."""
    pool = torch.arange(2 * 12 * 2 * 6).reshape(2, 12, 2, 6).to(dtype)
    if dtype.is_floating_point:
        pool[:, 7, 0, :3] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=dtype)
    wanted, found = pool.clone(), pool.clone().to(device)
    source, target = torch.tensor([7, 0, 8]), torch.tensor([5, 0, 7])
    naive.commit_kv([wanted[..., 2:]], source, target)
    commit_kv([found[..., 2:]], source.to(device), target.to(device))
    assert same_bits(wanted, found)


@pytest.mark.parametrize("shape", [(2, 12, 3, 1400), (1, 12, 9001), (1, 12, 4097, 2)])
def test_wide_rows_are_committed_whole(shape: tuple[int, ...], device: torch.device) -> None:
    """Slots of more elements than are copied at a time move to the last element, in overlapping moves."""
    assert math.prod(shape[2:]) > _MAX_BLOCK
    wanted = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = wanted.to(device, copy=True)
    source, target = torch.tensor([7, 0, 8]), torch.tensor([5, 0, 7])
    naive.commit_kv([wanted], source, target)
    commit_kv([found], source.to(device), target.to(device))
    assert same_bits(wanted, found)


@pytest.mark.parametrize("steps", [(2, 1), (1, 2), (3, 2)])
def test_sources_and_targets_may_be_columns(steps: tuple[int, int], device: torch.device) -> None:
    """Moves further apart than one element, each list by a stride of its own; what lies between names other slots."""
    wanted = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    found = wanted.to(device, copy=True)
    moves = torch.tensor([7, 0, 8, 12]), torch.tensor([5, 0, 7, 9])
    between = torch.arange(20, 24), torch.arange(30, 34)
    source, target = (
        torch.stack([slots] + [other] * (step - 1), 1).to(device)[:, 0]
        for slots, other, step in zip(moves, between, steps, strict=True)
    )
    assert (source.stride(0), target.stride(0)) == steps
    naive.commit_kv([wanted], *moves)
    commit_kv([found], source, target)
    assert same_bits(wanted, found)


def test_commit_of_nothing_changes_nothing(device: torch.device) -> None:
    """A step whose paths are chains moves nothing, and no moves at all are fine."""
    old = torch.randn(2, 12, 3)
    cache = old.clone().to(device)
    for moves in (9, 0):
        none = torch.zeros(moves, dtype=torch.int64, device=device)
        commit_kv([cache], none, none)
        assert torch.equal(cache.cpu(), old)
