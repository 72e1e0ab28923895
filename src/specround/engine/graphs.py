"""`RoundGraphs`: decode rounds captured in CUDA graphs and replayed with other requests, blocks and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specround.engine.messages import ScheduledStep
from specround.round import StepShape

if TYPE_CHECKING:
    from specround.engine.runner import RoundOutcome, Runner

_WARM_UP_ROUNDS = 2


class RoundGraphs:
    """One graph per padded shape and pair of budgets (this round's and the next one's); captured when first needed.

    Args:
        request_sizes: Numbers of requests that get a graph, ascending.
        candidate_shapes: Candidates per request that get a graph, ascending.
        max_model_len: Upper bound of every request's slots in a captured round.
    """

    def __init__(self, request_sizes: Sequence[int], candidate_shapes: Sequence[int], max_model_len: int) -> None:
        self._request_sizes, self._candidate_shapes = tuple(request_sizes), tuple(candidate_shapes)
        self._max_model_len = max_model_len
        self._graphs: dict[tuple[StepShape, tuple[int, int]], tuple[torch.cuda.CUDAGraph, RoundOutcome]] = {}
        self._pool: Any = None
        self.num_replays = 0

    def padded(self, shape: StepShape) -> StepShape | None:
        """The smallest shape with a graph that holds a decode step; None when none does."""
        if shape.num_rows != shape.num_plan_rows:
            return None
        requests = next((size for size in self._request_sizes if size >= shape.num_requests), None)
        rows = next((size for size in self._candidate_shapes if size >= shape.num_columns), None)
        if requests is None or rows is None:
            return None
        sampled = requests * rows if shape.num_sampled_rows else 0
        each = (rows,) * requests
        bounds = (self._max_model_len,) * requests
        return StepShape(num_rows=each, num_plan_rows=each, kv_bounds=bounds, num_sampled_rows=sampled)

    def run(
        self, runner: Runner, shape: StepShape, budgets: tuple[int, int], upload: Callable[[], None]
    ) -> RoundOutcome:
        """Replay the round of a shape, capturing it first if it is new.

        Args:
            runner: Whose round.
            shape: From `padded`.
            budgets: Candidates that bounded this step, and that the next round may verify.
            upload: Uploads the step's arrays again; a capture overwrites them.
        """
        key = (shape, budgets)
        if key not in self._graphs:
            self._graphs[key] = self._capture(runner, shape, budgets)
            upload()
        graph, outcome = self._graphs[key]
        graph.replay()
        self.num_replays += 1
        return outcome

    def _capture(
        self, runner: Runner, shape: StepShape, budgets: tuple[int, int]
    ) -> tuple[torch.cuda.CUDAGraph, RoundOutcome]:
        """Warm up on the null request, so that no live state is touched, then record."""
        runner.upload_null(shape)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_ROUNDS):
                runner.run_round(shape, budgets)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = runner.run_round(shape, budgets)
        self._pool = self._pool or graph.pool()
        return graph, outcome


def null_step(shape: StepShape, req_idx: int) -> ScheduledStep:
    """A step of a shape in which every request is the null request."""
    count = shape.num_requests
    return ScheduledStep(
        step=-1,
        request_ids=("",) * count,
        req_idx=(req_idx,) * count,
        shape=replace(shape, num_plan_rows=(0,) * count),
        sampled=(False,) * count,
        budget=1,
        next_budget=1,
        next_max_drafts=(0,) * count,
    )
