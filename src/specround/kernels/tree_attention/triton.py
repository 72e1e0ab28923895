"""Tree attention in Triton: tiles of rows read their request's keys once, with an online softmax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specround.contract import KernelError
from specround.kernels.kv_cache.triton import read_paged
from specround.kernels.online_softmax.triton import LOG2E, LOWEST, fold, join_splits, store_rows
from specround.kernels.tree_attention.launch import LaunchShape, choose_shape, power_of_two
from specround.kernels.tree_attention.rows import AttentionRows

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    shape: LaunchShape | None = None,
) -> Tensor:
    """Attention of packed rows over paged keys and values; arguments and result as in `naive.tree_attention`.

    Args:
        query: `[N, H, D]` float32, bfloat16 or float16, in which products are computed.
        key_cache: `[S, Hkv, D]`, any strides.
        value_cache: `[S, Hkv, Dv]`, any strides.
        rows: Which keys each row sees; only its context and its host values are read.
        scale: Multiplies the scores.
        window: Sliding window in logical positions, or None.
        sinks: `[H]`, or None.
        softcap: `cap * tanh(score / cap)` on the scaled scores, or None.
        shape: Sizes of the launch; None = chosen.

    Returns:
        `[N, H, Dv]` in the query's dtype; rows that see nothing are zero.

    Raises:
        KernelError: The query's dtype is another.
    """
    if query.dtype not in _DTYPES:
        names = ", ".join(str(dtype) for dtype in _DTYPES)
        raise KernelError(f"query.dtype={query.dtype}: must be one of {names} in the Triton tree attention")
    num_rows, heads, key_dim = query.shape
    key_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    out = query.new_empty(num_rows, heads, value_dim)
    if num_rows == 0:
        return out
    if shape is None:
        shape = choose_shape(
            rows,
            key_heads=key_heads,
            repeats=heads // key_heads,
            width=power_of_two(key_dim) + power_of_two(value_dim),
            element_size=max(query.element_size(), key_cache.element_size()),
            window=window,
            device=query.device,
        )
    partial = stats = None
    if shape.num_splits > 1:
        partial = torch.empty(shape.num_splits, num_rows, heads, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, shape.num_splits, num_rows, heads, dtype=torch.float32, device=query.device)
    _launch_tiles(query, key_cache, value_cache, rows, scale, window, sinks, softcap, shape, out, partial, stats)
    if partial is not None and stats is not None:
        join_splits(partial, stats, sinks, out)
    return out


def _launch_tiles(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    shape: LaunchShape,
    out: Tensor,
    partial: Tensor | None,
    stats: Tensor | None,
) -> None:
    context = rows.context
    num_rows, heads, key_dim = query.shape
    key_heads, value_dim = key_cache.shape[1], value_cache.shape[2]
    repeats = heads // key_heads
    tile_rows = shape.block_rows // repeats
    counts = rows.counts
    uniform = min(counts) == max(counts)
    tiles_each = -(-counts[0] // tile_rows) if uniform else 0
    num_tiles = tiles_each * len(counts) if uniform else num_rows // tile_rows + len(counts)
    offsets = context.key_offsets if context.bits is not None else None
    _attend_tiles[(num_tiles, key_heads, shape.num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        partial,
        stats,
        context.row_start,
        context.context_len,
        context.positions,
        context.kv_len,
        context.base,
        context.bits,
        offsets,
        context.block_tables,
        sinks,
        num_rows,
        len(counts),
        0 if offsets is None else offsets.shape[1],
        context.block_tables.shape[1] * context.block_size,
        float(scale) if softcap is not None else float(scale) * LOG2E.value,
        0.0 if softcap is None else float(softcap),
        0 if window is None else window,
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        context.block_tables.stride(0),
        0 if offsets is None else offsets.stride(0),
        HEADS=heads,
        REPEATS=repeats,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILE_ROWS=tile_rows,
        TILES_EACH=tiles_each,
        BLOCK_REQUESTS=1 if uniform else power_of_two(len(counts)),
        BLOCK_M=shape.block_rows,
        BLOCK_N=shape.block_keys,
        BLOCK_D=max(16, power_of_two(key_dim)),
        BLOCK_V=max(16, power_of_two(value_dim)),
        BLOCK_SIZE=context.block_size,
        NUM_SPLITS=shape.num_splits,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        # The interpreter would multiply the bits of bfloat16 as integers; in float32 the products are the same.
        PRODUCT=tl.float32 if query.device.type == "cpu" else _DTYPES[query.dtype],
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )


@triton.jit
def _attend_tiles(
    query,
    key_cache,
    value_cache,
    out,
    partial,
    stats,
    row_start,
    context_len,
    positions,
    kv_len,
    base,
    bits,
    key_offsets,
    block_tables,
    sinks,
    num_rows,
    num_requests,
    num_columns,
    table_slots,
    scale,
    softcap,
    window,
    query_row,
    query_head,
    query_dim,
    key_slot,
    key_head,
    key_dim,
    value_slot,
    value_head,
    value_dim,
    table_row,
    offset_row,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    request, tile = _place(tl.program_id(0), row_start, num_requests, TILE_ROWS, TILES_EACH, BLOCK_REQUESTS)
    first = tl.load(row_start + request)
    count = tl.load(row_start + request + 1) - first
    if tile * TILE_ROWS >= count:
        return
    row, member, real, context, position, seen, live = _tile_rows(
        first, count, tile, context_len, positions, bits, REPEATS, TILE_ROWS, BLOCK_M
    )
    head = tl.program_id(1) * REPEATS + member
    root = tl.load(base + request).to(tl.int32)
    limit = tl.minimum(tl.load(kv_len + request).to(tl.int32), table_slots)
    start, middle, stop = _key_range(
        limit, context, position, seen, live, root, window, key_offsets is not None, HAS_WINDOW, BLOCK_N, NUM_SPLITS
    )

    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + row[:, None] * query_row + head[:, None] * query_head + dims[None, :] * query_dim,
        mask=real[:, None] & (dims < KEY_DIM)[None, :],
        other=0.0,
    )
    table = block_tables + request.to(tl.int64) * table_row
    offsets = key_offsets
    if key_offsets is not None:
        offsets = key_offsets + request.to(tl.int64) * offset_row
    keys = key_cache + tl.program_id(1).to(tl.int64) * key_head
    values = value_cache + tl.program_id(1).to(tl.int64) * value_head
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for here in tl.range(start, middle, BLOCK_N, num_stages=STAGES):
        k, v, place = read_paged(
            here, stop, table, keys, values, key_slot, key_dim, value_slot, value_dim,
            KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_SIZE, False,
        )  # fmt: skip
        scores = _scores(q, k, scale, softcap, HAS_SOFTCAP, PRODUCT)
        if HAS_WINDOW:
            scores = tl.where(position[:, None] - place[None, :] < window, scores, float("-inf"))
        acc, top, total = fold(acc, top, total, scores, v, q.dtype, PRODUCT)
    for here in tl.range(middle, stop, BLOCK_N, num_stages=1):
        k, v, place = read_paged(
            here, stop, table, keys, values, key_slot, key_dim, value_slot, value_dim,
            KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_SIZE, True,
        )  # fmt: skip
        scores = _scores(q, k, scale, softcap, HAS_SOFTCAP, PRODUCT)
        visible = _visible(
            place, stop, context, position, seen, root, offsets, num_columns, window, bits is not None, HAS_WINDOW
        )
        scores = tl.where(visible, scores, float("-inf"))
        acc, top, total = fold(acc, top, total, scores, v, q.dtype, PRODUCT)
    acc = tl.where(live[:, None], acc, 0.0)
    top, total = tl.where(live, top, LOWEST), tl.where(live, total, 0.0)
    store_rows(
        acc, top, total, out, partial, stats, sinks, row, head, real, num_rows, start < stop,
        HEADS, VALUE_DIM, BLOCK_V, NUM_SPLITS,
    )  # fmt: skip


@triton.jit
def _tile_rows(
    first,
    count,
    tile,
    context_len,
    positions,
    bits,
    REPEATS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The packed row of each lane, its query head within the key head's, whether it is one, and what it sees."""
    lane = tl.arange(0, BLOCK_M)
    inner = tile * TILE_ROWS + lane // REPEATS
    real = (lane < TILE_ROWS * REPEATS) & (inner < count)
    row = (first + inner).to(tl.int64)
    context = tl.load(context_len + row, mask=real, other=0).to(tl.int32)
    position = tl.load(positions + row, mask=real, other=0).to(tl.int32)
    live = real & (context > 0)
    seen = row * 0
    if bits is not None:
        seen = tl.load(bits + row, mask=real, other=0)
        live = real & ((context > 0) | (seen != 0))
    return row, lane % REPEATS, real, context, position, seen, live


@triton.jit
def _key_range(
    limit,
    context,
    position,
    seen,
    live,
    root,
    window,
    HAS_OFFSETS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Keys `start .. stop` of this split; every live row sees those below `middle`, but for the window."""
    stop = tl.max(tl.maximum(context, tl.where(seen != 0, root + 64, 0)))
    stop = tl.minimum(stop, limit)
    every = tl.min(tl.where(live, context, stop))
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(tl.min(tl.where(live, position, stop + window)) - window + 1, 0)
        if HAS_OFFSETS:
            start, every = tl.minimum(start, root), tl.minimum(every, root)
    start = tl.minimum(start, stop) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), NUM_SPLITS) * BLOCK_N
    start += tl.program_id(2) * share
    stop = tl.minimum(stop, start + share)
    middle = tl.maximum(tl.minimum(every, stop) // BLOCK_N * BLOCK_N, start)
    return start, middle, stop


@triton.jit
def _place(
    tile,
    row_start,
    num_requests,
    TILE_ROWS: tl.constexpr,
    TILES_EACH: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,
):
    """Request and tile in it. Request r owns tiles from `row_start[r] // TILE_ROWS + r` on, if counts differ."""
    if TILES_EACH > 0:
        request, inside = tile // TILES_EACH, tile % TILES_EACH
    else:
        places = tl.arange(0, BLOCK_REQUESTS)
        first = tl.load(row_start + places, mask=places < num_requests, other=2**30) // TILE_ROWS + places
        started = first <= tile
        request, inside = tl.sum(started.to(tl.int32)) - 1, tile - tl.max(tl.where(started, first, 0))
    return request, inside


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRODUCT: tl.constexpr):
    """Scores in powers of two."""
    scores = tl.dot(q.to(PRODUCT), k.to(q.dtype).to(PRODUCT), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1)) * LOG2E
    return scores


@triton.jit
def _visible(
    place,
    stop,
    context,
    position,
    seen,
    root,
    offsets,
    num_columns,
    window,
    HAS_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Which rows see which keys."""
    visible = place[None, :] < context[:, None]
    column = place - root
    if HAS_BITS:
        inside = (column >= 0) & (column < 64)
        bit = (seen[:, None] >> tl.where(inside, column, 0)[None, :].to(tl.int64)) & 1
        visible = visible | (inside[None, :] & (bit != 0))
    if HAS_WINDOW:
        where = place
        if offsets is not None:
            placed = (column >= 0) & (column < num_columns)
            offset = tl.load(offsets + tl.where(placed, column, 0), mask=placed, other=0).to(tl.int32)
            where = tl.where(placed, root + offset, place)
        visible = visible & (position[:, None] - where[None, :] < window)
    return visible & (place < stop)[None, :]
