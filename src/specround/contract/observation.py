"""`StepObservation` and `RoundStats`: what a speculator is told after a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class StepObservation:
    """One sampled step, on the device: nothing in it was computed for the observer.

    Attributes:
        num_requests: R, requests in the step.
        num_rows: Rows the target's forward ran, padding excluded.
        graph_shape: Padded `(requests, rows)` of the replayed graph, or None when the step ran without one.
        num_candidates: `[R]` int32 on the device, candidates verified.
        num_committed: `[R]` int32 on the device, tokens committed.
    """

    num_requests: int
    num_rows: int
    graph_shape: tuple[int, int] | None
    num_candidates: Tensor
    num_committed: Tensor


@dataclass(frozen=True, kw_only=True)
class RoundStats:
    """One finished round as the host sees it, from counts that arrived there anyway.

    Attributes:
        step: Number of the step.
        seconds: Wall time between this step's results and the previous step's, in seconds.
        num_candidates: Candidates verified per request, batch order.
        num_committed: Tokens committed per request, batch order.
    """

    step: int
    seconds: float
    num_candidates: tuple[int, ...]
    num_committed: tuple[int, ...]
