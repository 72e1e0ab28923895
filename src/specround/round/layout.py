"""`PlanLayout`: the physical placement of a plan: ids, positions, slots and what each row sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import VerifyPlan
from specround.kernels.kv_cache.naive import slots_of
from specround.kernels.state_rows import StateRows
from specround.kernels.tree import TreeTables, committable_rows, mask_bits, tree_tables
from specround.kernels.tree_attention.rows import AttentionRows, RowContext, lay_out_rows
from specround.round.batch import RoundBatch
from specround.round.state_layout import lay_out_states


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanLayout:
    """Where every row of a step stands.

    Attributes:
        plan: The plan laid out.
        tables: Its tree tables, None for a chain.
        committable: `[R, C]` bool, rows that may be accepted, None for a chain.
        batch_idx: `[T]` int64, request of each packed row.
        input_ids: `[T]` int64, 0 where unused.
        positions: `[T]` int64, logical position.
        slots: `[T]` int64, flat cache slot, 0 (the null block) where unused.
        rows: What the rows see.
        logits_rows: `[num_logits_rows]` int64, packed row of each logits row.
        token_index: `[num_logits_rows]` int64, index in its request of the token each logits row decides.
        logits_batch_idx: `[num_logits_rows]` int64, request of each logits row.
        states: Where recurrent states of the rows come from and go to, None for a target without any.
    """

    plan: VerifyPlan
    tables: TreeTables | None
    committable: Tensor | None
    batch_idx: Tensor
    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: AttentionRows
    logits_rows: Tensor
    token_index: Tensor
    logits_batch_idx: Tensor
    states: StateRows | None = None


def lay_out(plan: VerifyPlan, batch: RoundBatch) -> PlanLayout:
    """Place a plan's rows after each request's chunk rows. Writes column 0 of the plan."""
    _write_roots(plan, batch)
    columns, total = plan.num_columns, batch.shape.total_rows
    device = plan.token_ids.device
    packed = torch.arange(total, device=device)
    batch_idx = torch.searchsorted(batch.row_start[1:].to(torch.int64), packed, right=True)
    column = packed - batch.root_row.to(torch.int64)[batch_idx]
    inside = column.clamp(0, columns - 1)
    is_plan = column >= 0
    used = column < plan.num_candidates[batch_idx]
    root = batch.root_position[batch_idx]
    index = root + column
    tables, visible, depth, committable = _topology(plan)
    chunk_ids = batch.token_history[batch.req_idx[batch_idx], index.clamp(max=batch.token_history.shape[1] - 1)]
    input_ids = torch.where(is_plan, plan.token_ids[batch_idx, inside], chunk_ids)
    offset = column if depth is None else torch.where(is_plan, depth[batch_idx, inside].to(torch.int64), column)
    positions = torch.where(used, root + offset, 0)
    by_bits = is_plan if visible is not None else torch.zeros_like(is_plan)
    parents = None
    if tables is not None or batch.states is not None:
        parents = _packed_parents(plan, batch, batch_idx, column)
    context = RowContext(
        row_start=batch.row_start,
        context_len=torch.where(used, torch.where(by_bits, root, index + 1), 0),
        positions=positions,
        kv_len=batch.root_position + plan.num_candidates,
        base=batch.root_position,
        bits=None if visible is None else torch.where(by_bits & used, visible[batch_idx, inside], 0),
        key_offsets=depth,
        block_tables=batch.block_tables,
        block_size=batch.block_size,
        parents=None if tables is None else parents,
    )
    logits_rows, logits_batch_idx, logits_column = _logits_rows(batch)
    row_depth = logits_column
    if tables is not None:
        row_depth = tables.depth[logits_batch_idx, logits_column.clamp(max=columns - 1)].to(torch.int64)
    states = None
    if batch.states is not None:
        assert parents is not None
        depths = None if tables is None else tables.depth
        states = lay_out_states(plan, batch, batch.states, batch_idx, parents, depths)
    return PlanLayout(
        plan=plan,
        tables=tables,
        committable=committable,
        batch_idx=batch_idx,
        input_ids=torch.where(used, input_ids, 0),
        positions=positions,
        slots=slots_of(batch.block_tables[batch_idx], index[:, None], batch.block_size, used[:, None])[:, 0],
        rows=lay_out_rows(batch.shape.num_rows, batch.shape.kv_bounds, context),
        logits_rows=logits_rows,
        token_index=batch.root_position[logits_batch_idx] + row_depth + 1,
        logits_batch_idx=logits_batch_idx,
        states=states,
    )


def _write_roots(plan: VerifyPlan, batch: RoundBatch) -> None:
    plan.token_ids[:, 0] = batch.root_token_ids
    if plan.parents is not None:
        plan.parents[:, 0] = -1
    if plan.positions is not None:
        plan.positions[:, 0] = 0


def _topology(plan: VerifyPlan) -> tuple[TreeTables | None, Tensor | None, Tensor | None, Tensor | None]:
    """Tables, visible columns, logical offsets and committable rows; all None for a chain."""
    if plan.kind == "chain":
        return None, None, None, None
    parents = plan.parents
    if parents is None:
        parents = (torch.arange(plan.num_columns, device=plan.token_ids.device) - 1).expand_as(plan.token_ids)
    tables = tree_tables(parents)
    visible = tables.ancestors if plan.mask is None else mask_bits(plan.mask)
    offsets = tables.depth if plan.positions is None else plan.positions
    return tables, visible, offsets.to(torch.int64), committable_rows(tables, visible, plan.positions)


def _packed_parents(plan: VerifyPlan, batch: RoundBatch, batch_idx: Tensor, column: Tensor) -> Tensor:
    """Packed row of each row's parent; a chunk row's is the row before it, -1 for the first row of a request."""
    packed = torch.arange(column.shape[0], device=column.device)
    before = torch.where(packed > batch.row_start.to(torch.int64)[batch_idx], packed - 1, -1)
    if plan.parents is None:
        return before
    parent = plan.parents[batch_idx, column.clamp(0, plan.num_columns - 1)].to(torch.int64)
    return torch.where(column > 0, batch.root_row.to(torch.int64)[batch_idx] + parent, before)


def _logits_rows(batch: RoundBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Packed row, request and column of each logits row."""
    start = batch.logits_start.to(torch.int64)
    row = torch.arange(batch.shape.num_logits_rows, device=start.device)
    batch_idx = torch.searchsorted(start[1:], row, right=True)
    column = row - start[batch_idx]
    return batch.root_row.to(torch.int64)[batch_idx] + column, batch_idx, column
