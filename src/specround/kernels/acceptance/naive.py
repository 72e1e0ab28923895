"""Acceptance in plain torch: the target's own draw at every row, then the longest path that agrees with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import AcceptResult, VerifyPlan
from specround.kernels.acceptance.philox import gumbel_noise
from specround.kernels.tree import TreeTables, column_bits


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Which logits rows are sampled (temperature > 0), known on the host.

    Attributes:
        rows: `[M]` int64, rows of the logits.
        seeds: `[M]` int64, seed of each row's request.
        token_index: `[M]` int64, index in its request of the token each row decides (root's index + depth + 1).
        noise_scale: `[M]` float32 factor of the noise, 0 = greedy after all, or None = 1.
    """

    rows: Tensor
    seeds: Tensor
    token_index: Tensor
    noise_scale: Tensor | None = None


def draw_tokens(logits: Tensor, sampled: SampledRows | None) -> Tensor:
    """The token the target emits at each row: argmax for greedy rows, seeded Gumbel-max for sampled ones.

    Args:
        logits: `[N, V]` float32, processed.
        sampled: The rows that are sampled, or None when every row is greedy.

    Returns:
        `[N]` int64.

    Example:
        >>> draw_tokens(torch.tensor([[0.0, 2.0, 1.0]]), None)
        tensor([1])
    """
    drawn = logits.argmax(-1)
    if sampled is None:
        return drawn
    noise = gumbel_noise(sampled.seeds, sampled.token_index, logits.shape[1])
    if sampled.noise_scale is not None:
        noise = noise * sampled.noise_scale[:, None]
    return drawn.index_copy(0, sampled.rows, (logits.index_select(0, sampled.rows) + noise).argmax(-1))


def accept_chain(plan: VerifyPlan, drawn: Tensor) -> AcceptResult:
    """The longest prefix of a chain that agrees with the draws.

    Args:
        plan: A chain plan `[R, C]`.
        drawn: `[R, C]` int64, the target's token at each row; arbitrary at unused columns.
    """
    columns = plan.num_columns
    index = torch.arange(columns, device=drawn.device)
    used = index < plan.num_candidates[:, None]
    agrees = used.clone()
    agrees[:, 1:] &= plan.token_ids[:, 1:] == drawn[:, :-1]
    kept = agrees.to(torch.int32).cumprod(1)
    return _result(torch.where(kept == 1, index, -1), kept.sum(1), drawn)


def accept_tree(plan: VerifyPlan, tables: TreeTables, committable: Tensor, drawn: Tensor) -> AcceptResult:
    """The longest matching path of committable rows; ties go to the lowest column, equal siblings are legal.

    Args:
        plan: A tree or mask plan `[R, C]`.
        tables: Its tree tables.
        committable: `[R, C]` bool.
        drawn: `[R, C]` int64, the target's token at each row; arbitrary at unused columns.
    """
    columns = plan.num_columns
    index = torch.arange(columns, device=drawn.device)
    parents = _parents(plan)
    matches = plan.token_ids == drawn.gather(1, parents.clamp(0, columns - 1))
    agrees = (matches & (parents >= 0)) | (index == 0)
    agrees = agrees & committable & (index < plan.num_candidates[:, None])
    agreed = torch.where(agrees, column_bits(columns, drawn.device), 0).sum(1, keepdim=True)
    accepted = (tables.ancestors & ~agreed) == 0
    rank = torch.where(accepted, tables.depth * columns + (columns - 1 - index), -1)
    best = rank.argmax(1, keepdim=True)
    alive = rank.gather(1, best) >= 0
    on_path = alive & (((tables.ancestors.gather(1, best) >> index) & 1) == 1)
    place = torch.where(on_path, tables.depth.to(torch.int64), columns)
    path = torch.full((drawn.shape[0], columns + 1), -1, dtype=torch.int64, device=drawn.device)
    path.scatter_(1, place, index.expand_as(place))
    return _result(path[:, :columns], on_path.sum(1), drawn)


def _parents(plan: VerifyPlan) -> Tensor:
    if plan.parents is not None:
        return plan.parents.to(torch.int64)
    return (torch.arange(plan.num_columns, device=plan.token_ids.device) - 1).expand_as(plan.token_ids)


def _result(path: Tensor, num_committed: Tensor, drawn: Tensor) -> AcceptResult:
    tokens = torch.where(path >= 0, drawn.gather(1, path.clamp(min=0)), -1)
    return AcceptResult(path.to(torch.int32), num_committed.to(torch.int32), tokens)
