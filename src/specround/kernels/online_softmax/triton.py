"""Online softmax in Triton: folding in blocks of scores, and joining splits of the keys. Scores are powers of two.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; splits: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOWEST: tl.constexpr = tl.constexpr(-1.0e38)
"""Largest score of a row that has seen nothing: finite, so that a difference of two is no NaN."""
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_PARTS = 32
"""Rows of `Dv` that a program of the join reads at once."""


def join_splits(partial: Tensor, stats: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Join what the splits of the keys left.

    Args:
        partial: `[splits, N, H, Dv]` float32, weighted sums of values; not read where a split saw nothing.
        stats: `[2, splits, N, H]` float32, largest scores and sums of weights.
        sinks: `[H]`, or None.
        out: `[N, H, Dv]`, contiguous, written.
    """
    num_splits, num_rows, heads, value_dim = partial.shape
    splits = triton.next_power_of_2(num_splits)
    block = max(1, _PARTS // splits)
    _join_splits[(-(-num_rows * heads // block),)](
        partial,
        stats,
        sinks,
        out,
        num_rows * heads,
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_M=block,
        BLOCK_S=splits,
        NUM_SPLITS=num_splits,
        num_warps=4,
    )


@triton.jit
def fold(acc, top, total, scores, v, DTYPE: tl.constexpr, PRODUCT: tl.constexpr):
    """One step of the online softmax."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    weights, v = weights.to(DTYPE).to(PRODUCT), v.to(DTYPE).to(PRODUCT)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def finish(acc, top, total, sinks, head, real):
    """Divide by the sum of the weights, the sink's included."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        peak = tl.maximum(top, sink)
        shrink = tl.exp2(top - peak)
        acc, total = acc * shrink[:, None], total * shrink + tl.exp2(sink - peak)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _join_splits(
    partial,
    stats,
    sinks,
    out,
    num_cells,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = cell < num_cells
    split, columns = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    inside = columns < VALUE_DIM
    place = split[None, :] * num_cells + cell[:, None]
    known = real[:, None] & (split < NUM_SPLITS)[None, :]
    tops = tl.load(stats + place, mask=known, other=LOWEST)
    totals = tl.load(stats + NUM_SPLITS * num_cells + place, mask=known, other=0.0)
    parts = tl.load(
        partial + place[:, :, None] * VALUE_DIM + columns[None, None, :],
        mask=(totals > 0)[:, :, None] & inside[None, None, :],
        other=0.0,
    )
    top = tl.max(tops, 1)
    weights = tl.exp2(tops - top[:, None])
    acc, total = tl.sum(parts * weights[:, :, None], 1), tl.sum(totals * weights, 1)
    result = finish(acc, top, total, sinks, (cell % HEADS).to(tl.int32), real)
    tl.store(
        out + cell[:, None] * VALUE_DIM + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )
