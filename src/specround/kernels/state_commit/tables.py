"""`StateTables`: per-request bookkeeping of recurrent states, shared by all recurrent layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specround.kernels.state_rows import StateMode


class StateTables:
    """Persistent tensors with fixed addresses, indexed by `req_idx`.

    Args:
        mode: How states of drafts are kept.
        num_requests: Request slots, the null request's included.
        max_drafts: P, the most drafts of a round.
        device: Where the tensors live.

    Attributes:
        blocks: `[rows, span]` int64, state blocks of each request; column 0 is the committed state, 0 = the null block.
            Span is 1 in mode "replay", and 1 + P in mode "slots", where column c takes the state of plan column c.
        pending_path: `[rows, P]` int64, mode "replay": plan columns of the accepted drafts of the last round.
        pending_len: `[rows]` int64, how many.
        parity: `[rows]` int64, 0 or 1: which half of the row buffers holds the last round's drafts.
    """

    def __init__(self, mode: StateMode, num_requests: int, max_drafts: int, device: torch.device) -> None:
        self.mode: StateMode = mode
        self.num_requests, self.max_drafts = num_requests, max_drafts
        self.span = 1 + max_drafts if mode == "slots" else 1

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.blocks = zeros(num_requests, self.span)
        self.pending_path = zeros(num_requests, max_drafts)
        self.pending_len = zeros(num_requests)
        self.parity = zeros(num_requests)

    @property
    def num_row_slots(self) -> int:
        """Row-buffer slots of each layer, the null slot 0 included; none in mode "slots"."""
        return 1 + 2 * self.num_requests * self.max_drafts if self.mode == "replay" else 0

    def row_slots(self, req_idx: Tensor, parity: Tensor, columns: Tensor) -> Tensor:
        """Row-buffer slot of plan columns, `[..]` int64 like the arguments, which broadcast; columns are at least 1."""
        return 1 + (parity * self.num_requests + req_idx) * self.max_drafts + columns - 1

    def start(self, req_idx: int, blocks: Sequence[int]) -> None:
        """Give a request its blocks, span of them; nothing of a former owner stays pending."""
        row = torch.tensor(blocks, dtype=torch.int64)
        if self.blocks.device.type == "cuda":
            row = row.pin_memory()
        self.blocks[req_idx].copy_(row, non_blocking=True)
        self.pending_len[req_idx].fill_(0)

    def leave(self, req_idx: int) -> None:
        """Take a request's blocks: a late round of it writes to the null block only."""
        self.blocks[req_idx].fill_(0)
        self.pending_len[req_idx].fill_(0)
