"""What recurrent ops share: fold pending drafts, prefill chunks, step through the levels of trees, store states.

An op supplies its arithmetic as a `Recurrence`. Its inputs are of two sorts: *writes* change a state and are what mode
"replay" keeps of a draft row; *reads* only an output depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specround.kernels.state_rows import ChunkGroup, StateRows

Inputs = tuple[Tensor, ...]
"""Inputs of an op in its own order, all with the same leading shape: packed rows, steps, or chunks."""

PIECE = 64
"""Tokens of a chunk that are prefilled with one set of matrix products."""

SPAN = 16
"""Pieces whose products that need no state are computed together; bounds the memory of a prefill."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """An op's arithmetic, on any number of states at once.

    A step whose writes are all zero leaves a state as it is. Padding is selected to zero and needs no case of its own.

    Attributes:
        advance: `(states [M, ...], writes [M, ...])`: one step, in place. The only place where a single row changes a
            state; elementwise or by `sum_pairwise`, so that a state's bits depend on nothing else in the batch.
        read: `(states [M, ...], reads [M, ...]) -> outputs [M, ...]`, under the same condition.
        prefill: `(states [G, ...], writes [G, T, ...], reads [G, T, ...]) -> (outputs [G, T, ...], states)`: T steps in
            a row, in chunked form.
    """

    advance: Callable[[Tensor, Inputs], None]
    read: Callable[[Tensor, Inputs], Tensor]
    prefill: Callable[[Tensor, Inputs, Inputs], tuple[Tensor, Tensor]]


def walk(
    recurrence: Recurrence,
    states: Tensor,
    buffers: Inputs,
    rows: StateRows,
    writes: Inputs,
    reads: Inputs,
    output_shape: tuple[int, ...],
) -> Tensor:
    """One forward of a recurrent op: fold, chunks, levels, store.

    Args:
        recurrence: The op's arithmetic.
        states: `[B, ...]`, state blocks, written in place.
        buffers: `[S, ...]` each, row buffers of `writes`, written in place in mode "replay".
        rows: The rows of this forward.
        writes: `[N, ...]` each, in the states' dtype.
        reads: `[N, ...]` each, in the states' dtype.
        output_shape: Shape of one row's output.

    Returns:
        `[N, *output_shape]` in the states' dtype; unused rows hold anything.
    """
    requests = rows.num_requests
    plan_rows = rows_of_levels(rows)
    held = states.new_empty(requests + plan_rows.numel(), *states.shape[1:])
    _fold(recurrence, states, buffers, rows, held[:requests])
    out = states.new_zeros(rows.num_rows + 1, *output_shape)  # the last one is nobody's
    for group in rows.chunks:
        _prefill(recurrence, held, group, writes, reads, out)
    first = requests
    for level in rows.levels:
        stop = first + level.rows.numel()
        stepped = held[first:stop]
        torch.index_select(held[:first], 0, level.sources, out=stepped)
        index = level.rows.clamp(max=rows.num_rows - 1)
        recurrence.advance(stepped, take(writes, index))
        out.index_copy_(0, level.rows, recurrence.read(stepped, take(reads, index)))
        first = stop
    _store(states, buffers, rows, writes, held, plan_rows)
    return out[: rows.num_rows]


def fold_pending(recurrence: Recurrence, states: Tensor, buffers: Inputs, rows: StateRows) -> None:
    """Fold the pending path into the committed states and do nothing else: a flush, without rows of a step.

    Args:
        recurrence: The op's arithmetic.
        states: `[B, ...]`, written in place.
        buffers: `[S, ...]` each, row buffers of the writes.
        rows: Names the blocks and the pending path; its other fields are not read.
    """
    held = states.new_empty(rows.num_requests, *states.shape[1:])
    _fold(recurrence, states, buffers, rows, held)
    states.index_copy_(0, rows.committed_block, held)


def rows_of_levels(rows: StateRows) -> Tensor:
    """`[M]` int64, the rows of all levels in order; N where a level is padded."""
    if not rows.levels:
        return rows.committed_block.new_empty(0)
    return torch.cat([level.rows for level in rows.levels])


def places_of(where: Tensor | None, plan_rows: Tensor) -> Tensor:
    """The block or row-buffer slot of each row of the levels; 0 where a level is padded.

    Args:
        where: `[N]` int64, `row_block` or `row_slot`.
        plan_rows: `[M]` int64, at most N.
    """
    assert where is not None, "the state mode's row_block or row_slot is missing"
    return functional.pad(where, (0, 1))[plan_rows]


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Rows `[M]` of each input: `[M, ...]`."""
    return tuple(x.index_select(0, rows) for x in inputs)


def take_real(inputs: Inputs, rows: Tensor, real: Tensor) -> Inputs:
    """Rows `[M]` of each input, selected to zero where `real` `[M]` is false, whatever the input holds there."""
    return tuple(
        torch.where(real.view(-1, *[1] * (x.dim() - 1)), x.index_select(0, rows), x.new_zeros(())) for x in inputs
    )


def sum_pairwise(terms: Tensor, dim: int) -> Tensor:
    """Sum over a dimension by adding its halves, elementwise; destroys `terms`.

    A library's sum or product may split a reduction by the size of the whole tensor, its alignment or the number of
    threads. Here the order of additions depends on the length of the dimension alone.

    Args:
        terms: Overwritten.
        dim: Dimension to sum over, not empty.
    """
    width = terms.shape[dim]
    while width > 1:
        half = (width + 1) // 2
        terms.narrow(dim, 0, width - half).add_(terms.narrow(dim, half, width - half))
        width = half
    return terms.select(dim, 0)


def piece_length(tokens: int) -> int:
    """Length of the pieces a chunk of `tokens` is cut into: a power of two, at most `PIECE`."""
    return min(PIECE, 1 << max(tokens - 1, 0).bit_length())


def cut_spans(inputs: Inputs, piece: int, span: int = SPAN) -> Iterator[Inputs]:
    """Cut chunks into spans of at most `span` pieces, padded with zeros on the right.

    Args:
        inputs: `[G, T, ...]` each.
        piece: L, tokens per piece.
        span: Most pieces per span.

    Yields:
        `[n, G, L, ...]` each: the n pieces of a span in order.
    """
    tokens = inputs[0].shape[1]
    for first in range(0, tokens, span * piece):
        length = min(span * piece, tokens - first)
        pieces = -(-length // piece)
        padded = (
            functional.pad(x[:, first : first + length], (0, 0) * (x.dim() - 2) + (0, pieces * piece - length))
            for x in inputs
        )
        yield tuple(x.reshape(x.shape[0], pieces, piece, *x.shape[2:]).transpose(0, 1) for x in padded)


def join_spans(outputs: list[Tensor], tokens: int) -> Tensor:
    """Undo `cut_spans`: spans `[n, G, L, ...]` to `[G, T, ...]`."""
    return torch.cat([out.transpose(0, 1).flatten(1, 2) for out in outputs], 1)[:, :tokens]


def decay_between(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The decay from each token of a piece to each later one.

    Args:
        total: `[..., L, 1]` float64, sum of the log decays from the start of the piece up to and with each token.
            float64, because after a strong decay small differences of large sums matter.
        dtype: Of the result.

    Returns:
        `[..., L, L]`: `exp(total_i - total_j)` for j <= i, 0 for others, which are masked before the exponential.
    """
    length = total.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=total.device).triu_(1)
    return (total - total.mT).to(dtype).masked_fill_(later, float("-inf")).exp_()


def _fold(recurrence: Recurrence, states: Tensor, buffers: Inputs, rows: StateRows, held: Tensor) -> None:
    """Load the committed states into `held` `[R, ...]`, take the steps of the pending path, store snapshots."""
    torch.index_select(states, 0, rows.committed_block, out=held)
    pending = rows.pending
    if pending is None:
        return
    snapshot = held
    for place in range(pending.slots.shape[1]):
        recurrence.advance(held, take_real(buffers, pending.slots[:, place], place < pending.length))
        if pending.snapshot_after is not None:
            here = (pending.snapshot_after == place + 1).view(-1, *[1] * (held.dim() - 1))
            snapshot = torch.where(here, held, snapshot)
    if pending.snapshot_after is not None and pending.snapshot_block is not None:
        block = torch.where(pending.snapshot_after > 0, pending.snapshot_block, 0)
        states.index_copy_(0, block, snapshot)


def _prefill(
    recurrence: Recurrence, held: Tensor, group: ChunkGroup, writes: Inputs, reads: Inputs, out: Tensor
) -> None:
    """Run the chunks of a group from the states in `held` and leave the states after them there."""
    num_rows = out.shape[0] - 1
    flat = group.rows.flatten()
    index, real = flat.clamp(max=num_rows - 1), flat < num_rows
    chunk_writes, chunk_reads = (
        tuple(x.view(*group.rows.shape, *x.shape[1:]) for x in take_real(inputs, index, real))
        for inputs in (writes, reads)
    )
    outputs, after = recurrence.prefill(held.index_select(0, group.requests), chunk_writes, chunk_reads)
    held.index_copy_(0, group.requests, after)
    out.index_copy_(0, flat, outputs.flatten(0, 1))


def _store(states: Tensor, buffers: Inputs, rows: StateRows, writes: Inputs, held: Tensor, plan_rows: Tensor) -> None:
    """Store each request's state, and of each draft row its state or its writes."""
    requests = rows.num_requests
    place = torch.arange(held.shape[0], device=held.device)
    place_of_row = plan_rows.new_zeros(rows.num_rows + 1).index_copy_(0, plan_rows, place[requests:])
    last = torch.where(rows.last_row < rows.num_rows, place_of_row[rows.last_row], 0)
    # 0: the last row is in no level, so that the state before the root is the one to store
    states.index_copy_(0, rows.committed_block, held.index_select(0, torch.where(last > 0, last, place[:requests])))
    if rows.mode == "slots":
        states.index_copy_(0, places_of(rows.row_block, plan_rows), held[requests:])
        return
    slots, index = places_of(rows.row_slot, plan_rows), plan_rows.clamp(max=rows.num_rows - 1)
    for buffer, kept in zip(buffers, writes, strict=bool(buffers)):  # an op without buffers keeps no drafts
        buffer.index_copy_(0, slots, kept.index_select(0, index).to(buffer.dtype))
