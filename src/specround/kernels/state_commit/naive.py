"""State commit in plain torch: a change of tables, whatever the number of layers."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import AcceptResult
from specround.kernels.state_commit.tables import StateTables


def commit_states(tables: StateTables, req_idx: Tensor, result: AcceptResult) -> None:
    """Make the state after each path's last row the committed one.

    Mode "slots": the block of that row changes places with the committed block. Mode "replay": the accepted drafts
    become the pending path, which the next verify folds in, and the row buffers' halves change roles; whatever was
    pending before has been folded in by this round's verify.

    Args:
        tables: Changed in place.
        req_idx: `[R]` int64, the requests of the step; the null request may be there more than once.
        result: The accepted paths; requests without candidates have `num_committed` 0.
    """
    path, last = result.path.to(torch.int64), (result.num_committed.to(torch.int64) - 1).clamp(min=0)
    if tables.mode == "slots":
        blocks = tables.blocks[req_idx]
        column = path.gather(1, last[:, None]).clamp(min=0)
        chosen = blocks.gather(1, column)
        swapped = blocks.scatter(1, column, blocks[:, :1])
        swapped[:, :1] = chosen
        tables.blocks.index_copy_(0, req_idx, swapped)
        return
    drafts = path[:, 1:]
    pending = tables.pending_path[req_idx]
    pending[:, : drafts.shape[1]] = drafts
    tables.pending_path.index_copy_(0, req_idx, pending)
    tables.pending_len.index_copy_(0, req_idx, last)
    tables.parity.index_copy_(0, req_idx, 1 - tables.parity[req_idx])
