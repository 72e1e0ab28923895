"""`DraftRowLayout`: where a drafter's rows stand in the paged KV that it shares with the target, in every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import DraftRows
from specround.kernels.tree_attention.rows import AttentionRows, RowContext, lay_out_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftSlots:
    """The blocks of every request slot.

    Attributes:
        block_tables: `[rows, B]` int64.
        num_allocated_slots: `[rows]` int64, slots the blocks of each request have.
        block_size: Slots per block.
        max_kv_len: Upper bound of the slots any row may see.
    """

    block_tables: Tensor
    num_allocated_slots: Tensor
    block_size: int
    max_kv_len: int


class DraftRowLayout:
    """Remembers the tree that each request's drafts grow, and lays out the rows of one draft forward after the other.

    Args:
        num_rows: Request slots, the one of padding included.
        device: Where the tensors live.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._null_req_idx = num_rows - 1
        self._base = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ancestors = torch.zeros(num_rows, 64, dtype=torch.int64, device=device)
        self._offsets = torch.zeros(num_rows, 64, dtype=torch.int64, device=device)

    def lay_out(self, rows: DraftRows, held: DraftSlots) -> tuple[AttentionRows, Tensor]:
        """What the rows see, and their flat slots `[N]`, 0 = padding.

        Args:
            rows: The rows of the next forward.
            held: The requests' blocks.
        """
        req_idx = rows.req_idx
        live = (rows.slots >= 0) & (rows.slots < held.num_allocated_slots[req_idx])
        rooted = live & (rows.parents < 0)
        self._grow(rows, live, rooted)
        base = self._base[req_idx]
        column = (rows.slots - base).clamp(0, 63)
        bits = torch.where(live & ~rooted, self._ancestors[req_idx, column], 0)
        context_len = torch.where(rooted, rows.slots + 1, torch.where(live, base + 1, 0))
        row_start, owners = _request_bounds(rows.num_rows, req_idx)
        tables = held.block_tables[owners]
        safe = rows.slots.clamp(min=0)
        block = held.block_tables[req_idx, (safe // held.block_size).clamp(max=tables.shape[1] - 1)]
        slots = torch.where(live, block * held.block_size + safe % held.block_size, 0)
        context = RowContext(
            row_start=row_start,
            context_len=context_len,
            positions=rows.positions,
            kv_len=self._highest(rows, live)[owners] + 1,
            base=self._base[owners],
            bits=bits,
            key_offsets=self._offsets[owners],
            block_tables=tables,
            block_size=held.block_size,
        )
        return lay_out_rows(rows.num_rows, held.max_kv_len, context), slots

    def _grow(self, rows: DraftRows, live: Tensor, rooted: Tensor) -> None:
        """Remember tree bases and ancestors; column 0 is the base, which the context covers."""
        latest = self._highest(rows, rooted)
        self._base.copy_(torch.where(latest >= 0, latest, self._base))
        base = self._base[rows.req_idx]
        grown = live & ~rooted
        parent = (rows.parents - base).clamp(0, 63)
        column = (rows.slots - base).clamp(0, 63)
        inherited = torch.where(parent > 0, self._ancestors[rows.req_idx, parent], 0)
        own = inherited | (torch.ones_like(column) << column)
        owner = torch.where(grown, rows.req_idx, self._null_req_idx)
        self._ancestors[owner, column] = own
        self._offsets[owner, column] = rows.positions - base

    def _highest(self, rows: DraftRows, chosen: Tensor) -> Tensor:
        """Highest slot among the chosen rows of each request slot, -1 without one."""
        slots = torch.where(chosen, rows.slots, -1)
        return torch.full_like(self._base, -1).scatter_reduce(0, rows.req_idx, slots, "amax")


def _request_bounds(num_rows: Sequence[int], req_idx: Tensor) -> tuple[Tensor, Tensor]:
    """`row_start [R + 1]` int32 and the slot of each request, from host counts without an upload when uniform."""
    count = len(num_rows)
    if min(num_rows) == max(num_rows):
        step = num_rows[0]
        return torch.arange(count + 1, device=req_idx.device, dtype=torch.int32) * step, req_idx[::step]
    counts = torch.tensor(num_rows, dtype=torch.int32)
    if req_idx.is_cuda:
        counts = counts.pin_memory().to(req_idx.device, non_blocking=True)
    row_start = torch.zeros(count + 1, dtype=torch.int32, device=req_idx.device)
    row_start[1:] = counts.cumsum(0)
    return row_start, req_idx[row_start[:-1].to(torch.int64)]
