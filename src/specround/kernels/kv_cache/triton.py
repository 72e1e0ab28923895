"""KV write, KV commit and reads through block tables in Triton: only rows that have a slot are read or written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BLOCK = 4096


def write_kv(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write rows to their slots; rows with slot 0 are padding, which is not touched.

    Args:
        key_cache: `[S, Hkv, D]`, written in place, any strides.
        value_cache: `[S, Hkv, Dv]`, written in place, any strides.
        key: `[N, Hkv, D]`, any strides.
        value: `[N, Hkv, Dv]`, any strides.
        slots: `[N]` int64; slots other than 0 are distinct.
    """
    key, value = key.to(key_cache.dtype), value.to(value_cache.dtype)  # rounds as torch does; most often nothing to do
    num_rows, heads, key_dim = key.shape
    if num_rows == 0:
        return
    widest = heads * max(key_dim, value.shape[2])
    _write_rows[(num_rows, 2)](
        key_cache,
        value_cache,
        key,
        value,
        slots,
        *key_cache.stride(),
        *value_cache.stride(),
        *key.stride(),
        *value.stride(),
        slots.stride(0),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value.shape[2],
        BLOCK=_block(widest),
    )


def commit_kv(caches: Iterable[Tensor], source: Tensor, target: Tensor) -> None:
    """Move slots to slots in every cache; a first launch reads all sources, a second one writes the targets.

    Args:
        caches: Tensors `[L, S, ...]`: L layers that share a shape, S slots; written in place, any strides.
        source: `[M]` int64 slots to read; 0 where nothing moves.
        target: `[M]` int64 slots to write; 0 where nothing moves, otherwise distinct.
    """
    for cache in caches:
        _commit(cache, source, target)


def _commit(cache: Tensor, source: Tensor, target: Tensor) -> None:
    moves, layers = source.numel(), cache.shape[0]
    if moves == 0 or cache.numel() == 0:
        return
    stored = cache.view(_BITS[cache.element_size()])
    while stored.ndim < 4:
        stored = stored.unsqueeze(2)
    stored = stored.view(*stored.shape[:3], -1)
    heads, width = stored.shape[2:]
    held = torch.empty(layers, moves, heads * width, dtype=stored.dtype, device=cache.device)
    strides = (*stored.stride(), source.stride(0), target.stride(0))
    for scatter in (False, True):
        _move_rows[(moves, layers)](
            stored, held, source, target, moves, *strides,
            HEADS=heads, WIDTH=width, BLOCK=_block(heads * width), SCATTER=scatter,
        )  # fmt: skip


def _block(elements: int) -> int:
    return int(min(triton.next_power_of_2(elements), _MAX_BLOCK))


@triton.jit
def _write_rows(
    key_cache,
    value_cache,
    key,
    value,
    slots,
    key_cache_slot,
    key_cache_head,
    key_cache_dim,
    value_cache_slot,
    value_cache_head,
    value_cache_dim,
    key_row,
    key_head,
    key_dim,
    value_row,
    value_head,
    value_dim,
    slots_row,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row * slots_row).to(tl.int64)
    if slot == 0:
        return
    if tl.program_id(1) == 0:
        _copy_row(
            key + row * key_row, key_head, key_dim, key_cache + slot * key_cache_slot, key_cache_head, key_cache_dim,
            HEADS, KEY_DIM, BLOCK,
        )  # fmt: skip
    else:
        _copy_row(
            value + row * value_row, value_head, value_dim,
            value_cache + slot * value_cache_slot, value_cache_head, value_cache_dim, HEADS, VALUE_DIM, BLOCK,
        )  # fmt: skip


@triton.jit
def _move_rows(
    stored,
    held,
    source,
    target,
    moves,
    layer_stride,
    slot_stride,
    head_stride,
    dim_stride,
    source_stride,
    target_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCATTER: tl.constexpr,
):
    move, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    to = tl.load(target + move * target_stride).to(tl.int64)
    if to == 0:
        return
    row = held + (layer * moves + move) * HEADS * WIDTH
    slots = stored + layer * layer_stride
    if SCATTER:
        _copy_row(row, WIDTH, 1, slots + to * slot_stride, head_stride, dim_stride, HEADS, WIDTH, BLOCK)
    else:
        at = tl.load(source + move * source_stride).to(tl.int64)
        _copy_row(slots + at * slot_stride, head_stride, dim_stride, row, WIDTH, 1, HEADS, WIDTH, BLOCK)


@triton.jit
def _copy_row(
    source,
    source_head,
    source_dim,
    target,
    target_head,
    target_dim,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `[HEADS, WIDTH]` elements as they are."""
    for start in tl.static_range(0, HEADS * WIDTH, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < HEADS * WIDTH
        head, dim = place // WIDTH, place % WIDTH
        found = tl.load(source + head * source_head + dim * source_dim, mask=inside)
        tl.store(target + head * target_head + dim * target_dim, found, mask=inside)


@triton.jit
def read_paged(
    here,
    stop,
    table,
    keys,
    values,
    key_slot,
    key_dim,
    value_slot,
    value_dim,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys `[D, BLOCK_N]` and values `[BLOCK_N, Dv]` of a request, and their places; zero at and past `stop`."""
    place = here + tl.arange(0, BLOCK_N)
    dims, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    if MASKED:
        held = place < stop
        block = tl.load(table + place // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
    else:
        held = place >= 0
        block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + place % BLOCK_SIZE
    key = keys + slot[None, :] * key_slot + dims[:, None] * key_dim
    value = values + slot[:, None] * value_slot + columns[None, :] * value_dim
    if MASKED or KEY_DIM != BLOCK_D:
        k = tl.load(key, mask=held[None, :] & (dims < KEY_DIM)[:, None], other=0.0)
    else:
        k = tl.load(key)
    if MASKED or VALUE_DIM != BLOCK_V:
        v = tl.load(value, mask=held[:, None] & (columns < VALUE_DIM)[None, :], other=0.0)
    else:
        v = tl.load(value)
    return k, v, place
