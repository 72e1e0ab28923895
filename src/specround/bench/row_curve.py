"""What verifying several rows costs: forward and logits for 1 to 64 rows of one request, over one row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specround.bench.step_clock import replaced
from specround.contract import BaseSpeculator, BudgetView, SpecResources, SpeculatorConfig
from specround.engine import LLM, SamplingParams

if TYPE_CHECKING:
    from specround.contract import DraftHost, ProposeView

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256
_WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class RowCurveConfig(SpeculatorConfig):
    """Drafts nonsense, as many tokens as the next row count asks for: every row count of `ROWS` in turn."""

    num_speculative_tokens: int = max(ROWS) - 1

    def declare_resources(self) -> SpecResources:
        """A chain of up to 64 rows."""
        return SpecResources(max_candidates=self.num_speculative_tokens + 1)

    def candidate_budget(self, view: BudgetView) -> int:
        """The row count whose turn it is, so that a slow moment of the machine hits all of them alike."""
        return min(ROWS[view.step % len(ROWS)], view.max_candidates)

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> BaseSpeculator:
        """Build the speculator."""
        return _Nonsense(host.vocab_size)


class _Nonsense(BaseSpeculator):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, view: ProposeView) -> None:
        columns = view.draft_token_ids.shape[1]
        drafts = torch.arange(columns, device=view.draft_token_ids.device) * 7919 % self._vocab_size
        view.draft_token_ids.index_copy_(0, view.req_idx, drafts.expand(len(view.req_idx), -1))


def measure_row_curve(llm: LLM, repeats: int, wait: Callable[[], None] | None = None) -> dict[str, Any]:
    """Time forwards by their number of rows.

    Args:
        llm: An engine with `speculative_config={"method": "specround.bench.row_curve:RowCurveConfig"}`.
        repeats: Forwards of each row count.
        wait: Waits for the device; None on a CPU.

    Returns:
        The context at the start and, by rows, milliseconds of forward and of logits and the cost over one row. Row
        counts that do not fit the model's context are left out.
    """
    rounds = (repeats + _WARM_UP) * len(ROWS)
    longest = llm.engine.max_model_len
    context = max(2, min(CONTEXT, longest - rounds - max(ROWS) - 1))
    seen: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    current = {"rows": 0, "forward": 0.0}

    def now() -> float:
        if wait is not None:
            wait()
        return time.perf_counter()

    def on_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(input_ids: torch.Tensor, *others: Any) -> Any:
            started = now()
            hidden = forward(input_ids, *others)
            current.update(rows=input_ids.shape[0], forward=now() - started)
            return hidden

        return timed

    def on_logits(logits: Callable[..., Any]) -> Callable[..., Any]:
        def timed(hidden: torch.Tensor) -> Any:
            started = now()
            result = logits(hidden)
            if current["rows"] in seen and hidden.shape[0] == current["rows"]:
                seen[int(current["rows"])].append((current["forward"], now() - started))
            return result

        return timed

    prompt = [token % llm.engine.model.vocab_size for token in range(11, 11 + context)]
    most = min(longest - context, rounds * 2 + max(ROWS))
    with ExitStack() as stack:
        stack.enter_context(replaced(llm.engine.model, "forward", on_forward))
        stack.enter_context(replaced(llm.engine.model, "logits", on_logits))
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        stream = llm.stream({"prompt_token_ids": prompt}, params)
        for number, _ in enumerate(stream):
            if number >= rounds:
                break
        stream.close()  # type: ignore[attr-defined]
    return {"context": context, "rows": _costs(seen)}


def _costs(seen: dict[int, list[tuple[float, float]]]) -> list[dict[str, float]]:
    costs: list[dict[str, float]] = []
    for rows, samples in seen.items():
        kept = samples[_WARM_UP:]
        if not kept:
            continue
        forward = statistics.median(forward for forward, _ in kept)
        logits = statistics.median(logits for _, logits in kept)
        costs.append({"rows": rows, "forward_ms": 1e3 * forward, "logits_ms": 1e3 * logits, "cost": 0.0})
    for entry in costs:
        one = costs[0]["forward_ms"] + costs[0]["logits_ms"]
        entry["cost"] = (entry["forward_ms"] + entry["logits_ms"]) / one
    return costs if costs and costs[0]["rows"] == 1 else []
