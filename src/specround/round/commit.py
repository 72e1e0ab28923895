"""Commit: make caches and row tensors equal what a chain of the accepted tokens would have left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import AcceptResult
from specround.kernels.kv_cache.naive import slots_of
from specround.kernels.reference import PagedCommitKernel
from specround.round.batch import RoundBatch
from specround.round.layout import PlanLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class CommittedRows:
    """A step's rows after commit, the path's rows in chain order.

    Attributes:
        input_ids: `[T]` int64.
        positions: `[T]` int64, token index, -1 for rows that were not committed.
        hidden_states: `[T, H]` or None.
    """

    input_ids: Tensor
    positions: Tensor
    hidden_states: Tensor | None


def commit_paths(kernel: PagedCommitKernel, caches: Iterable[Tensor], result: AcceptResult, batch: RoundBatch) -> None:
    """Move the KV of each path from the slots of its columns to the chain's slots, in every cache.

    Args:
        kernel: The `layout:paged_token/commit` kernel.
        caches: `[L, S, ...]` tensors of layers that share a shape, target and draft.
        result: The accepted paths.
        batch: The step.
    """
    path = result.path.to(torch.int64)
    place = torch.arange(path.shape[1], device=path.device).expand_as(path)
    moves = (place < result.num_committed[:, None]) & (path != place)
    root = batch.root_position[:, None]
    source = slots_of(batch.block_tables, root + path, batch.block_size, moves)
    target = slots_of(batch.block_tables, root + place, batch.block_size, moves)
    kernel(caches, source.flatten(), target.flatten())


def commit_rows(
    layout: PlanLayout, result: AcceptResult, batch: RoundBatch, hidden_states: Tensor | None
) -> CommittedRows:
    """Bring input ids and hidden states of the path's rows into chain order and mark the rest."""
    root_row = batch.root_row.to(torch.int64)[layout.batch_idx]
    packed = torch.arange(batch.shape.total_rows, device=root_row.device)
    place = packed - root_row
    path = result.path.to(torch.int64)
    column = path[layout.batch_idx, place.clamp(0, path.shape[1] - 1)]
    kept = place < result.num_committed[layout.batch_idx]
    source = torch.where((place >= 0) & kept, root_row + column, packed)
    index = batch.root_position[layout.batch_idx] + place
    return CommittedRows(
        input_ids=layout.input_ids[source],
        positions=torch.where(kept, index, -1),
        hidden_states=None if hidden_states is None else hidden_states.index_select(0, source),
    )
