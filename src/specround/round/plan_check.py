"""Value checks of plans and accept results: always on a CPU, on request elsewhere because they read device values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from specround.contract import PLAN_KINDS, AcceptResult, PlanError, SpecResources, VerifyPlan
from specround.kernels.tree import tree_tables
from specround.round.batch import RoundBatch
from specround.round.layout import PlanLayout

_PLAN_DTYPES = {
    "token_ids": torch.int64,
    "num_candidates": torch.int32,
    "parents": torch.int32,
    "positions": torch.int32,
    "mask": torch.bool,
}
_RESULT_DTYPES = {"path": torch.int32, "num_committed": torch.int32, "token_ids": torch.int64}


def check_plan_shape(plan: VerifyPlan, batch: RoundBatch, resources: SpecResources) -> None:
    """Refuse what the host can see without reading values: a kind above the effective one, or wrong sizes or dtypes.

    Raises:
        PlanError: Names the kind or size and what is allowed.
    """
    if PLAN_KINDS.index(plan.kind) > PLAN_KINDS.index(resources.kind):
        raise PlanError(f"a {plan.kind} plan: the effective resources allow at most a {resources.kind}")
    if plan.num_requests != batch.shape.num_requests:
        raise PlanError(f"the plan has {plan.num_requests} requests: this step has {batch.shape.num_requests}")
    if plan.num_columns > max(resources.max_candidates, batch.shape.num_columns):
        raise PlanError(f"the plan has {plan.num_columns} columns: at most {resources.max_candidates} are effective")
    _check_dtypes(plan, _PLAN_DTYPES)
    for name in ("token_ids", "parents", "positions"):
        tensor = getattr(plan, name)
        if tensor is not None and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise PlanError(f"{name} is a broadcast view: must own its memory, because the engine writes column 0")


def check_plan_values(plan: VerifyPlan, batch: RoundBatch, resources: SpecResources, vocab_size: int) -> None:
    """Check a plan by value, column 0 excepted: the engine writes it.

    Raises:
        PlanError: Names request (batch index), column, and the values.
    """
    count, limit = plan.num_candidates.to(torch.int64), batch.max_rows.to(torch.int64)
    bad = (count > limit) | (count < limit.clamp(max=1))
    if bool(bad.any()):
        r = int(bad.nonzero()[0])
        allowed = "0" if int(limit[r]) == 0 else f"1 to {int(limit[r])}"
        raise PlanError(f"batch place {r}: num_candidates={int(count[r])}: must be {allowed}", r)
    column = torch.arange(plan.num_columns, device=count.device)
    draft = (column > 0) & (column < count[:, None])
    _refuse(draft & (plan.token_ids < 0), plan.token_ids, "token_ids", "a token id: used columns are a prefix")
    _refuse(draft & (plan.token_ids >= vocab_size), plan.token_ids, "token_ids", f"below {vocab_size}")
    depth = column.expand_as(draft)
    if plan.parents is not None:
        _refuse(draft & (plan.parents < 0), plan.parents, "parents", ">= 0 in a used column")
        _refuse(draft & (plan.parents >= column), plan.parents, "parents", "smaller than the own column")
        depth = tree_tables(torch.where(column == 0, -1, plan.parents)).depth  # column 0 may still hold anything
        _check_branching(plan.parents, draft, resources.max_branching)
    _refuse(draft & (depth > resources.depth_limit), depth, "depth", f"at most {resources.depth_limit}")
    if plan.positions is not None:
        _refuse(draft & (plan.positions < 0), plan.positions, "positions", ">= 0")


def check_num_drafts(num_drafts: Sequence[int] | None, num_requests: int) -> Sequence[int] | None:
    """Check what `propose` returned.

    Raises:
        PlanError: Neither None nor one count >= 0 per request.
    """
    if num_drafts is None:
        return None
    counts = list(num_drafts)
    if len(counts) != num_requests or any(type(count) is not int or count < 0 for count in counts):
        raise PlanError(f"propose returned {counts}: must be None or {num_requests} counts >= 0, one per request")
    return counts


def check_result_shape(result: AcceptResult, plan: VerifyPlan) -> None:
    """Refuse what the host can see of an accept result without reading values.

    Raises:
        PlanError: Names the tensor, its shape or dtype, and what is allowed.
    """
    _check_dtypes(result, _RESULT_DTYPES)
    if result.path.shape != plan.token_ids.shape:
        found, wanted = tuple(result.path.shape), tuple(plan.token_ids.shape)
        raise PlanError(f"path has shape {found}: must be {wanted}, as the plan")


def check_result(result: AcceptResult, layout: PlanLayout, vocab_size: int) -> None:
    """Check what a speculator's own `accept` returned.

    Raises:
        PlanError: Names request, place in the path, and the values.
    """
    plan, path = layout.plan, result.path.to(torch.int64)
    count, have = result.num_committed.to(torch.int64), plan.num_candidates.to(torch.int64)
    bad = (count > have) | (count < have.clamp(max=1))
    if bool(bad.any()):
        r = int(bad.nonzero()[0])
        raise PlanError(
            f"batch place {r}: num_committed={int(count[r])}: must be {min(1, int(have[r]))} to {int(have[r])}", r
        )
    place = torch.arange(path.shape[1], device=path.device)
    kept = place < count[:, None]
    _refuse(kept & ((path < 0) | (path >= have[:, None])), path, "path", "a used column")
    _refuse(kept & (place == 0) & (path != 0), path, "path", "0 at its start")
    safe = path.clamp(0, path.shape[1] - 1)
    parents = plan.parents if plan.parents is not None else (place - 1).expand_as(path)
    before = torch.cat([path[:, :1], path[:, :-1]], 1)
    linked = parents.to(torch.int64).gather(1, safe) == before
    _refuse(kept & (place > 0) & ~linked, path, "path", "a child of the column before it")
    if layout.committable is not None:
        _refuse(kept & ~layout.committable.gather(1, safe), path, "path", "a committable row, not a probe")
    tokens = result.token_ids
    _refuse(kept & ((tokens < 0) | (tokens >= vocab_size)), tokens, "token_ids", f"0 to {vocab_size - 1}")
    drafts = plan.token_ids.gather(1, safe)
    differs = torch.zeros_like(kept)
    differs[:, :-1] = kept[:, 1:] & (tokens[:, :-1] != drafts[:, 1:])
    _refuse(differs, tokens, "token_ids", "the draft of the next column of the path")


def _check_dtypes(owner: object, dtypes: Mapping[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        tensor = getattr(owner, name)
        if tensor is not None and tensor.dtype != dtype:
            raise PlanError(f"{name} has dtype {tensor.dtype}: must be {dtype}")


def _check_branching(parents: Tensor, draft: Tensor, max_branching: int) -> None:
    columns = parents.shape[1]
    where = torch.where(draft, parents.to(torch.int64), columns)
    children = torch.zeros(parents.shape[0], columns + 1, dtype=torch.int64, device=parents.device)
    children.scatter_add_(1, where, torch.ones_like(where))
    _refuse(children[:, :columns] > max_branching, children, "children", f"at most max_branching={max_branching}")


def _refuse(bad: Tensor, values: Tensor, name: str, allowed: str) -> None:
    if bool(bad.any()):
        _raise_at(bad, values, name, allowed)


def _raise_at(bad: Tensor, values: Tensor, name: str, allowed: str) -> NoReturn:
    r, column = (int(part) for part in bad.nonzero()[0])
    raise PlanError(f"batch place {r}, column {column}: {name}={int(values[r, column])}: must be {allowed}", r)
