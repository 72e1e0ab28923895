"""Where recurrent states of a step's rows come from and go to: `StateRows` of a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import VerifyPlan
from specround.kernels.state_commit import StateTables
from specround.kernels.state_rows import ChunkGroup, PendingPath, StateLevel, StateRows
from specround.kernels.tree_attention.rows import group_requests
from specround.round.batch import RoundBatch, StepShape


def lay_out_states(
    plan: VerifyPlan, batch: RoundBatch, tables: StateTables, batch_idx: Tensor, parents: Tensor, depth: Tensor | None
) -> StateRows:
    """Lay out states for a plan.

    On a CPU a level holds all rows of one depth. On other devices, where depths are not known to the host, a level
    holds one column of all requests: the same arithmetic in more steps.

    Args:
        plan: A chain or a tree.
        batch: The step.
        tables: The requests' states.
        batch_idx: `[N]` int64, request of each packed row.
        parents: `[N]` int64, packed row of each row's parent, -1 for the first row of a request.
        depth: `[R, C]` of a tree, None for a chain.
    """
    shape, req_idx = batch.shape, batch.req_idx
    root_row, row_start = batch.root_row.to(torch.int64), batch.row_start.to(torch.int64)
    has_root = plan.num_candidates > 0
    last_row = torch.where(has_root, root_row, torch.where(root_row > row_start[:-1], root_row - 1, shape.total_rows))
    column = torch.arange(shape.total_rows, device=root_row.device) - root_row[batch_idx]
    is_draft = (column > 0) & (column < plan.num_candidates[batch_idx])
    owner = req_idx[batch_idx]
    if root_row.device.type == "cpu":
        levels = _levels_by_depth(plan, root_row, depth)
    else:
        levels = _levels_by_column(plan, shape, root_row, row_start[1:] - root_row)
    row_block = row_slot = pending = None
    if tables.mode == "slots":
        row_block = torch.where(is_draft, tables.blocks[owner, column.clamp(0, tables.span - 1)], 0)
    else:
        row_slot = torch.where(is_draft, tables.row_slots(owner, 1 - tables.parity[owner], column), 0)
        pending = pending_path(tables, req_idx)
    return StateRows(
        mode=tables.mode,
        num_rows=shape.total_rows,
        committed_block=tables.blocks[req_idx, 0],
        last_row=last_row,
        row_request=batch_idx,
        parents=parents,
        chunks=_chunks(shape, row_start, root_row),
        levels=levels,
        row_block=row_block,
        row_slot=row_slot,
        pending=pending,
    )


def pending_path(tables: StateTables, req_idx: Tensor) -> PendingPath:
    """What the last round of some requests accepted and their states do not hold yet.

    Args:
        tables: The requests' states, mode "replay".
        req_idx: `[R]` int64.
    """
    length, path = tables.pending_len[req_idx], tables.pending_path[req_idx]
    if path.device.type == "cpu":
        path = path[:, : int(length.max()) if length.numel() else 0]
    place = torch.arange(path.shape[1], device=path.device)
    slots = tables.row_slots(req_idx[:, None], tables.parity[req_idx][:, None], path.clamp(min=1))
    return PendingPath(slots=torch.where(place < length[:, None], slots, 0), length=length)


def flush_rows(tables: StateTables, req_idx: Tensor) -> StateRows:
    """`StateRows` of a step without rows, which folds in what is pending and nothing else.

    Args:
        tables: The requests' states.
        req_idx: `[R]` int64.
    """
    empty = req_idx.new_zeros(0)
    return StateRows(
        mode=tables.mode,
        num_rows=0,
        committed_block=tables.blocks[req_idx, 0],
        last_row=torch.zeros_like(req_idx),
        row_request=empty,
        parents=empty,
        chunks=(),
        levels=(),
        row_block=empty if tables.mode == "slots" else None,
        row_slot=empty if tables.mode == "replay" else None,
        pending=pending_path(tables, req_idx) if tables.mode == "replay" else None,
    )


def _chunks(shape: StepShape, row_start: Tensor, root_row: Tensor) -> tuple[ChunkGroup, ...]:
    """Rows before roots, of runs of requests with about as many of them."""
    counts = [rows - plan_rows for rows, plan_rows in zip(shape.num_rows, shape.num_plan_rows, strict=True)]
    groups = []
    for start, stop in group_requests(counts):
        longest = max(counts[start:stop])
        if longest:
            rows = row_start[start:stop, None] + torch.arange(longest, device=row_start.device)
            rows = torch.where(rows < root_row[start:stop, None], rows, shape.total_rows)
            groups.append(ChunkGroup(requests=torch.arange(start, stop, device=rows.device), rows=rows))
    return tuple(groups)


def _levels_by_depth(plan: VerifyPlan, root_row: Tensor, depth: Tensor | None) -> tuple[StateLevel, ...]:
    """One level per depth, of used rows only; reads values, which is free on a CPU."""
    requests, columns = plan.token_ids.shape
    place = torch.arange(columns).expand(requests, columns)
    depth = place if depth is None else depth.to(torch.int64)
    used = place < plan.num_candidates[:, None]
    order = torch.full((requests, columns), -1, dtype=torch.int64)
    levels, walked = [], 0
    for level in range(int(torch.where(used, depth, -1).max()) + 1 if requests else 0):
        request, column = torch.nonzero(used & (depth == level), as_tuple=True)
        order[request, column] = torch.arange(walked, walked + request.shape[0])
        walked += request.shape[0]
        sources = request
        if level:
            parent = column - 1 if plan.parents is None else plan.parents[request, column].to(torch.int64)
            sources = requests + order[request, parent]
        levels.append(StateLevel(rows=root_row[request] + column, sources=sources))
    return tuple(levels)


def _levels_by_column(
    plan: VerifyPlan, shape: StepShape, root_row: Tensor, num_plan_rows: Tensor
) -> tuple[StateLevel, ...]:
    """One level per column, each with every request, so that shapes are known without reading values."""
    requests, columns = plan.token_ids.shape
    every = torch.arange(requests, device=root_row.device)
    levels = []
    for column in range(columns if shape.num_logits_rows else 0):
        rows = torch.where(column < num_plan_rows, root_row + column, shape.total_rows)
        sources = every
        if column:
            parent = (
                column - 1 if plan.parents is None else plan.parents[:, column].to(torch.int64).clamp(0, column - 1)
            )
            sources = requests + parent * requests + every
        levels.append(StateLevel(rows=rows, sources=sources))
    return tuple(levels)
