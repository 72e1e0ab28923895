"""`StateRows`: which state each packed row starts from and where states are kept, shared by all recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

StateMode = Literal["replay", "slots"]
"""How the states of rows that may be rejected are kept: as inputs to run again, or as states."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkGroup:
    """Rows before the root, of requests with about as many of them: prefilled in one batched scan.

    Attributes:
        requests: `[G]` int64, batch place of each request; no request is in two groups.
        rows: `[G, T]` int64, packed rows in order, N where padded; padding is on the right.
    """

    requests: Tensor
    rows: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class StateLevel:
    """Plan rows that can take their step at once, because the states of their parents are known.

    Attributes:
        rows: `[M]` int64, packed row; N where padded. A row may be unused: then its result means nothing and is kept
            nowhere. A root's state is stored only if the root is its request's `last_row`.
        sources: `[M]` int64, where the parent's state is: r < R is the state of request r before its root, R + i the
            state of the i-th row of all levels, counted in their order.
    """

    rows: Tensor
    sources: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingPath:
    """Accepted drafts of each request's last round that its state does not hold yet (mode "replay").

    Attributes:
        slots: `[R, P]` int64, row-buffer slot of each, oldest first, 0 past the end.
        length: `[R]` int64, how many.
        snapshot_after: `[R]` int64 or None: store a copy of the state once so many of them are folded in, 1 to
            `length`; 0 = none.
        snapshot_block: `[R]` int64 or None: state block of that copy.
    """

    slots: Tensor
    length: Tensor
    snapshot_after: Tensor | None = None
    snapshot_block: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class StateRows:
    """All rows of one forward, as recurrent layers see them.

    A request's state goes through its pending drafts (mode "replay"), its rows before the root, and its root, which is
    accepted in every round; what it is then is stored in `committed_block`. From the root's state the drafts' states
    branch off. Mode "slots" stores the state of draft row i in `row_block[i]`; mode "replay" stores the row's inputs in
    slot `row_slot[i]` of the layer's row buffers, and no state.

    Block 0 is the null block and slot 0 the null slot: what is written there is lost, and nobody reads it.

    Attributes:
        mode: How drafts' states are kept.
        num_rows: N, packed rows.
        committed_block: `[R]` int64, state block of each request; 0 = a padded request.
        last_row: `[R]` int64, packed row after which a request's state is stored: its root, or its last row before the
            root if this step has no root, or N if the step has no row of it.
        row_request: `[N]` int64, batch place of each row's request.
        parents: `[N]` int64, packed row of each row's parent; -1 for the first row of a request.
        chunks: Rows before roots.
        levels: Roots, then drafts. Every row that is not in a chunk is in exactly one level, or is unused.
        row_block: `[N]` int64 in mode "slots": block of each draft row's state; 0 for all other rows.
        row_slot: `[N]` int64 in mode "replay": row-buffer slot of each draft row; 0 for all other rows.
        pending: Mode "replay": what was accepted last.
    """

    mode: StateMode
    num_rows: int
    committed_block: Tensor
    last_row: Tensor
    row_request: Tensor
    parents: Tensor
    chunks: tuple[ChunkGroup, ...]
    levels: tuple[StateLevel, ...]
    row_block: Tensor | None = None
    row_slot: Tensor | None = None
    pending: PendingPath | None = None
    _taps: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """R."""
        return self.committed_block.shape[0]

    def taps(self, width: int) -> Tensor:
        """The inputs of each row's causal convolution; computed once per width and forward.

        Args:
            width: K, the width of the convolution.

        Returns:
            `[N, K]` int64, oldest first, the last one the row itself: i < R * (K - 1) is entry i % (K - 1) of the
            window of request i // (K - 1), oldest first; R * (K - 1) + j is packed row j. The window that a row
            leaves behind is `taps[:, 1:]`.
        """
        if width not in self._taps:
            self._taps[width] = self._follow_parents(width)
        return self._taps[width]

    def _follow_parents(self, width: int) -> Tensor:
        entries = width - 1
        first = self.row_request * entries
        rows = torch.arange(self.num_rows, device=self.parents.device)
        below = torch.zeros_like(rows)  # how far past the first row of the request
        newest_first = []
        for _ in range(width):
            window = first + (entries - below).clamp(min=0)
            newest_first.append(torch.where(rows >= 0, self.num_requests * entries + rows, window))
            rows = torch.where(rows >= 0, self.parents[rows.clamp(min=0)], -1)
            below = below + (rows < 0)
        return torch.stack(newest_first[::-1], 1)
