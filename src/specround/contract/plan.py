"""`VerifyPlan`: which rows the target verifies, and the helpers that cut plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from specround.contract.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

PlanKind = Literal["none", "chain", "tree", "mask"]
PLAN_KINDS: tuple[PlanKind, ...] = ("none", "chain", "tree", "mask")
"""Plan kinds, lowest first: each kind can also express the ones before it."""

MAX_TREE_COLUMNS = 64
"""Trees and masks have at most this many columns (two int32 ancestor words)."""


def min_kind(*kinds: PlanKind) -> PlanKind:
    """The lowest of some plan kinds.

    Example:
        >>> min_kind("mask", "chain", "tree")
        'chain'
    """
    return PLAN_KINDS[min(PLAN_KINDS.index(kind) for kind in kinds)]


@dataclass(frozen=True, eq=False)
class VerifyPlan:
    """The rows the target model verifies for every request of a step.

    R is the step's requests in batch order, C the plan's columns. Column 0 of a request is its **root**, the last
    committed token; the engine writes column 0 of every plan. Buffers belong to the speculator and keep their
    addresses, so that a captured graph can replay the plan.

    Attributes:
        token_ids: `[R, C]` int64, -1 = unused column.
        num_candidates: `[R]` int32. Used columns are the prefix `0 .. n-1`; 0 only where the engine allows no row.
        parents: `[R, C]` int32 or None. Parent column, strictly smaller than the own column, -1 for column 0.
            None means a chain: the parent of column c is c - 1.
        positions: `[R, C]` int32 or None. Offset of each row from the root's position; None means the row's depth.
        mask: `[R, C, C]` bool or None. `mask[r, i, j]`: row i sees row j. Only j < i is read; a row always sees itself.

    Raises:
        PlanError: Shapes disagree, or a tree or mask has more than 64 columns. Values are checked by the engine.

    Example:
        Root, two children of the root, and a grandchild under the second child::

            VerifyPlan(
                token_ids=torch.tensor([[11, 7, 9, 4]]),
                num_candidates=torch.tensor([4], dtype=torch.int32),
                parents=torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32),
            )
    """

    token_ids: Tensor
    num_candidates: Tensor
    parents: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2:
            raise PlanError(f"token_ids has shape {tuple(self.token_ids.shape)}: must be [R, C]")
        rows, columns = self.token_ids.shape
        expected = {
            "num_candidates": (rows,),
            "parents": (rows, columns),
            "positions": (rows, columns),
            "mask": (rows, columns, columns),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                found = tuple(tensor.shape)
                raise PlanError(f"{name} has shape {found}: must be {shape} beside token_ids {rows, columns}")
        if columns < 1 or (self.kind != "chain" and columns > MAX_TREE_COLUMNS):
            allowed = "at least 1" if self.kind == "chain" else f"1 to {MAX_TREE_COLUMNS}"
            raise PlanError(f"a {self.kind} plan has {columns} columns: must be {allowed}")

    @property
    def kind(self) -> PlanKind:
        """`"mask"` if a mask or positions are given, else `"tree"` if parents are given, else `"chain"`.

        Decided by which fields are present, so it is known on the host without waiting for the device.
        """
        if self.mask is not None or self.positions is not None:
            return "mask"
        return "chain" if self.parents is None else "tree"

    @property
    def num_requests(self) -> int:
        """R, the number of requests."""
        return int(self.token_ids.shape[0])

    @property
    def num_columns(self) -> int:
        """C, the number of columns."""
        return int(self.token_ids.shape[1])


def trim_draft_tokens(plan: VerifyPlan, num_drafts: Tensor | int) -> VerifyPlan:
    """The same chain plan with fewer drafts per request.

    Args:
        plan: A chain plan.
        num_drafts: Drafts to keep at most, an int or `[R]` integer tensor, >= 0. Requests that have fewer keep theirs.

    Returns:
        A plan that shares `token_ids` with the given one. Requests without candidates stay without.

    Raises:
        PlanError: The plan is not a chain (cutting a tree by columns would keep an arbitrary part of it), or an int
            below 0 is given (that would drop the root).

    Example:
        >>> trim_draft_tokens(chain_plan, 2).num_candidates.max() <= 3
        tensor(True)
    """
    if plan.kind != "chain":
        raise PlanError(f"trim_draft_tokens was given a {plan.kind} plan: must be a chain")
    if isinstance(num_drafts, int):
        if num_drafts < 0:
            raise PlanError(f"num_drafts={num_drafts}: must be an integer >= 0")
        kept = plan.num_candidates.clamp(max=num_drafts + 1)
    else:
        kept = plan.num_candidates.minimum((num_drafts + 1).to(plan.num_candidates.dtype))
    return replace(plan, num_candidates=kept)


def slice_plan(plan: VerifyPlan, start: int, stop: int) -> VerifyPlan:
    """Requests `start .. stop-1` of a plan as views, positions and mask included.

    Args:
        plan: Any plan with R requests.
        start: First request, `0 <= start <= stop`.
        stop: One past the last request, `<= R`.

    Raises:
        PlanError: The range is not inside the plan.

    Example:
        >>> slice_plan(plan, 1, 3).num_requests
        2
    """
    if not 0 <= start <= stop <= plan.num_requests:
        raise PlanError(f"slice {start}:{stop} is outside a plan of {plan.num_requests} requests")

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[start:stop]

    return VerifyPlan(
        token_ids=plan.token_ids[start:stop],
        num_candidates=plan.num_candidates[start:stop],
        parents=cut(plan.parents),
        positions=cut(plan.positions),
        mask=cut(plan.mask),
    )
