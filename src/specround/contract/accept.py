"""`AcceptResult`: which rows of a plan are kept and which tokens that commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specround.contract.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class AcceptResult:
    """The path each request keeps, and the tokens it commits.

    Token i was decided by the logits of row `path[r, i]`. For `i < num_committed - 1` it is the draft in column
    `path[r, i + 1]`; the last one is the **bonus**, which becomes the next round's root.

    Attributes:
        path: `[R, C]` int32, columns kept in order, -1 = unused. `path[r, 0] == 0` wherever the request has candidates.
        num_committed: `[R]` int32, rows kept = tokens committed; 0 for a request without candidates.
        token_ids: `[R, C]` int64, the committed tokens, -1 = unused.

    Raises:
        PlanError: Shapes disagree.

    Example:
        The path root -> column 2 with the draft 9 accepted and the bonus 5::

            AcceptResult(
                path=torch.tensor([[0, 2, -1, -1]], dtype=torch.int32),
                num_committed=torch.tensor([2], dtype=torch.int32),
                token_ids=torch.tensor([[9, 5, -1, -1]]),
            )
    """

    path: Tensor
    num_committed: Tensor
    token_ids: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.path.shape)
        if len(shape) != 2 or tuple(self.token_ids.shape) != shape or tuple(self.num_committed.shape) != shape[:1]:
            raise PlanError(
                f"AcceptResult shapes path {shape}, token_ids {tuple(self.token_ids.shape)}, num_committed "
                f"{tuple(self.num_committed.shape)}: must be [R, C], [R, C] and [R]"
            )
