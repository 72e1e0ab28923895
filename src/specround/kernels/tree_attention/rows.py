"""`AttentionRows`: where each packed row's keys are and which of them it sees, shared by all layers of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from specround.kernels.tree import has_bit


@dataclass(frozen=True, eq=False, kw_only=True)
class RowContext:
    """What each packed row may see, on the device.

    A row sees every key slot below its `context_len`, and slot `base + j` for every bit j of its `bits`. Slots are
    chain slots: the index of a token in its request.

    Attributes:
        row_start: `[R + 1]` int32, where each request's rows begin.
        context_len: `[N]` int64.
        positions: `[N]` int64, logical position of each row, which windows measure.
        kv_len: `[R]` int64, slots of each request that hold keys; nothing at or past it is read.
        base: `[R]` int64, slot of column 0; used only with `bits`.
        bits: `[N]` int64 or None (no row sees by bits).
        key_offsets: `[R, C]` int64 or None: logical offset of the key in column j, None = j. Used only with `bits`.
        block_tables: `[R, B]` int64, block of each `block_size` slots; block 0 is the null block and holds zeros.
        block_size: Slots per block.
        parents: As `AttentionRows.parents`.
    """

    row_start: Tensor
    context_len: Tensor
    positions: Tensor
    kv_len: Tensor
    base: Tensor
    bits: Tensor | None
    key_offsets: Tensor | None
    block_tables: Tensor
    block_size: int
    parents: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Consecutive requests whose rows are padded to one length Q and attended in one batched call.

    Attributes:
        rows: `[G, Q]` int64 packed row, N where padded.
        key_slots: `[G * L]` int64 flat slot in the caches; 0 (a zero key in the null block) where there is no key.
        visible: `[G, Q, L]` bool. Padded rows see key 0 only, so that no softmax is empty.
        distance: `[G, Q, L]` int64, query position - key position.
        first_row: First packed row, when the group's rows are contiguous without padding, else -1.
    """

    rows: Tensor
    key_slots: Tensor
    visible: Tensor
    distance: Tensor
    first_row: int
    _bias: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[G, 1, repeats * Q, L]`: 0 where seen, -inf elsewhere; computed once per forward.

        Args:
            window: A key is seen if `distance < window`; None = no window.
            repeats: Query heads per key/value head; the mask repeats for each.
            dtype: The query's dtype.
        """
        key = (window, repeats, dtype)
        if key not in self._bias:
            seen = self.visible
            if window is not None:
                seen = seen & (self.distance < window)
                seen[:, :, 0] |= ~seen.any(-1)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            groups, rows, keys = seen.shape
            wide = bias[:, None, None].expand(groups, 1, repeats, rows, keys)
            self._bias[key] = wide.reshape(groups, 1, repeats * rows, keys)
        return self._bias[key]


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """All rows of one forward: what they see, on the device, and the shapes the host knows.

    Attributes:
        context: What each row sees; enough for a kernel that reads block tables and bits.
        counts: Rows of each request, batch order.
        bounds: Upper bound of each request's `kv_len`.
    """

    context: RowContext
    counts: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """N, packed rows."""
        return sum(self.counts)

    @property
    def parents(self) -> Tensor | None:
        """`[N]` int64, packed row of each row's parent, -1 for the first row of a request.

        None when every row's parent is the row before it (chains and prefill).
        """
        return self.context.parents

    @cached_property
    def groups(self) -> tuple[RowGroup, ...]:
        """Padded groups of requests with their masks, in batch order; made when first asked for, once a forward."""
        return tuple(_lay_out_groups(self.counts, self.bounds, self.context))


def group_requests(num_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive requests whose row counts share a power of two, so that padding at most doubles the work.

    Example:
        >>> group_requests([4, 4, 3, 1, 200])
        [(0, 3), (3, 4), (4, 5)]
    """
    size_class = [max(count - 1, 0).bit_length() for count in num_rows]
    cuts = [0] + [i for i in range(1, len(num_rows)) if size_class[i] != size_class[i - 1]] + [len(num_rows)]
    return [(start, stop) for start, stop in pairwise(cuts) if stop > start]


def lay_out_rows(num_rows: Sequence[int], max_kv_len: int | Sequence[int], context: RowContext) -> AttentionRows:
    """The rows of a forward. Host values fix shapes only; everything else stays on the device.

    Args:
        num_rows: Rows of each request, batch order; requests without rows take part in nothing.
        max_kv_len: Upper bound of `kv_len`, for all requests or for each.
        context: What rows see.
    """
    bounds = (max_kv_len,) * len(num_rows) if isinstance(max_kv_len, int) else tuple(max_kv_len)
    return AttentionRows(context, tuple(num_rows), bounds)


def _lay_out_groups(num_rows: Sequence[int], bounds: Sequence[int], context: RowContext) -> Iterator[RowGroup]:
    total, first = sum(num_rows), 0
    for start, stop in group_requests(num_rows):
        counts = num_rows[start:stop]
        if max(counts) == 0:
            continue
        uniform = min(counts) == max(counts)
        longest = max(1, *bounds[start:stop])
        yield _lay_out_group(start, stop, max(counts), longest, total, first if uniform else -1, context)
        first += sum(counts)


def _lay_out_group(
    start: int, stop: int, rows_each: int, longest: int, total: int, first_row: int, context: RowContext
) -> RowGroup:
    device = context.context_len.device
    row_start = context.row_start[start : stop + 1].to(torch.int64)
    rows = row_start[:-1, None] + torch.arange(rows_each, device=device)
    real = rows < row_start[1:, None]
    safe = rows.clamp(max=max(total - 1, 0))
    keys = torch.arange(longest, device=device)
    visible = keys < context.context_len[safe][:, :, None]
    base = context.base[start:stop, None]
    key_positions = keys.expand(stop - start, longest)
    if context.bits is not None:
        column = keys - base
        visible = visible | has_bit(context.bits[safe][:, :, None], column[:, None])
        if context.key_offsets is not None:
            offsets = context.key_offsets[start:stop]
            inside = (column >= 0) & (column < offsets.shape[1])
            placed = base + offsets.gather(1, column.clamp(0, offsets.shape[1] - 1))
            key_positions = torch.where(inside, placed, key_positions)
    held = keys < context.kv_len[start:stop, None]
    visible = visible & held[:, None] & real[:, :, None]
    visible[:, :, 0] |= ~visible.any(-1)
    table = context.block_tables[start:stop]
    block = table.gather(1, (keys // context.block_size).clamp(max=table.shape[1] - 1).expand(stop - start, longest))
    key_slots = torch.where(held, block * context.block_size + keys % context.block_size, 0)
    distance = context.positions[safe][:, :, None] - key_positions[:, None]
    return RowGroup(torch.where(real, rows, total), key_slots.flatten(), visible, distance, first_row)
