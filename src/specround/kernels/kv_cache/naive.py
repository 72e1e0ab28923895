"""KV write and KV commit in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def slots_of(block_tables: Tensor, token_index: Tensor, block_size: int, valid: Tensor) -> Tensor:
    """Flat cache slots of tokens; 0, which is in the null block, where `valid` is false.

    Args:
        block_tables: `[R, B]` int64.
        token_index: `[R, X]` integer, index of each token in its request.
        block_size: Slots per block.
        valid: `[R, X]` bool.

    Returns:
        `[R, X]` int64.
    """
    index = token_index.to(torch.int64).clamp(min=0)
    block = block_tables.gather(1, (index // block_size).clamp(max=block_tables.shape[1] - 1))
    return torch.where(valid, block * block_size + index % block_size, 0)


def write_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write rows to their slots. Rows with slot 0 are padding: the null block keeps its zeros.

    Args:
        key_cache: `[S, Hkv, D]`, written in place.
        value_cache: `[S, Hkv, Dv]`, written in place.
        key: `[N, Hkv, D]`.
        value: `[N, Hkv, Dv]`.
        slots: `[N]` int64; slots other than 0 are distinct.
    """
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.index_copy_(0, slots, rows.to(cache.dtype))
        cache[:1].zero_()


def commit_kv(caches: Iterable[Tensor], source: Tensor, target: Tensor) -> None:
    """Move slots to slots in every cache, gathering before scattering because the ranges overlap.

    Args:
        caches: Tensors `[L, S, ...]`: L layers that share a shape, S slots; written in place.
        source: `[M]` int64 slots to read; 0 where nothing moves.
        target: `[M]` int64 slots to write; 0 where nothing moves, otherwise distinct.
    """
    for cache in caches:
        cache.index_copy_(1, target, cache.index_select(1, source))
