"""From vLLM's input batch to the round's: `RoundBatch` and the shapes the host knows. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specround.integrations.vllm.requests import RequestTable
from specround.round import RoundBatch, StepShape


@dataclass(frozen=True, kw_only=True)
class StepRequests:
    """What vLLM scheduled, in batch order, as host values.

    Attributes:
        request_ids: The requests.
        req_idx: Their slots.
        num_rows: Rows of each.
        num_drafts: How many of them are for drafts.
        num_computed: Tokens whose KV is committed.
        prefill_len: Tokens to prefill: everything known when the request was (re)started.
    """

    request_ids: tuple[str, ...]
    req_idx: tuple[int, ...]
    num_rows: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_computed: tuple[int, ...]
    prefill_len: tuple[int, ...]

    @property
    def num_plan_rows(self) -> tuple[int, ...]:
        """0 for a prefill that does not end this step, 1 for one that does, 1 + drafts in decode."""
        per_request = zip(self.num_rows, self.num_drafts, self.num_computed, self.prefill_len, strict=True)
        return tuple(
            drafts + 1 if computed + rows - drafts >= prefill else 0 for rows, drafts, computed, prefill in per_request
        )

    @property
    def roots(self) -> tuple[int, ...]:
        """Position of each request's root."""
        per_request = zip(self.num_computed, self.num_rows, self.num_plan_rows, strict=True)
        return tuple(computed + rows - plan for computed, rows, plan in per_request)


def make_batch(
    requests: StepRequests, table: RequestTable, block_tables: Tensor, block_size: int, budget: int, max_candidates: int
) -> RoundBatch:
    """The round's view of a step.

    Args:
        requests: What vLLM scheduled.
        table: The requests' rows.
        block_tables: `[R, B]` of the first group of layers.
        block_size: Slots per block.
        budget: Candidates that bounded this step's rows.
        max_candidates: The effective cap.
    """
    device = table.token_history.device
    plan_rows = requests.num_plan_rows
    prefix = [rows - plan for rows, plan in zip(requests.num_rows, plan_rows, strict=True)]
    row_start, logits_start = offsets(requests.num_rows), offsets(plan_rows)
    sampled = [
        row
        for i, req_idx in enumerate(requests.req_idx)
        if table.temperature_cpu[req_idx] > 0
        for row in range(logits_start[i], logits_start[i + 1])
    ]
    caps = [
        min(rows, 1 if request_id in table.plain else max_candidates)
        for request_id, rows in zip(requests.request_ids, plan_rows, strict=True)
    ]

    def put(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(values, device, dtype)

    req_idx, computed = put(requests.req_idx), put(requests.num_computed)
    root_position, allowed = computed + put(prefix), put(caps)
    remaining = (table.limits[req_idx] - root_position - 1).clamp(min=1)
    root = table.token_history[req_idx, root_position.clamp(max=table.token_history.shape[1] - 1)]
    return RoundBatch(
        shape=StepShape(
            num_rows=requests.num_rows,
            num_plan_rows=plan_rows,
            kv_bounds=tuple(c + rows for c, rows in zip(requests.num_computed, requests.num_rows, strict=True)),
            num_sampled_rows=len(sampled),
        ),
        req_idx=req_idx,
        row_start=put(row_start, torch.int32),
        root_row=put([start + rows for start, rows in zip(row_start, prefix, strict=False)], torch.int32),
        logits_start=put(logits_start, torch.int32),
        sampled_rows=put(sampled),
        max_rows=torch.minimum(allowed, remaining).to(torch.int32),
        num_computed_tokens=computed.to(torch.int32),
        root_position=root_position,
        root_token_ids=torch.where(allowed > 0, root, -1),
        token_history=table.token_history,
        draft_token_ids=table.draft_token_ids,
        block_tables=block_tables.to(torch.int64),
        block_size=block_size,
        sampling=table.sampling,
        seeds=table.seeds,
        budget=budget,
    )


def upload(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host values on the device, without waiting for it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def offsets(counts: Sequence[int]) -> list[int]:
    """`[R + 1]` running sums that start at 0.

    Example:
        >>> offsets([2, 3])
        [0, 2, 5]
    """
    return list(accumulate(counts, initial=0))


def plan_logits(requests: StepRequests) -> list[int]:
    """Rows of vLLM's logits, which has 1 + drafts rows of every request, that are plan rows."""
    starts = offsets([drafts + 1 for drafts in requests.num_drafts])
    return [
        row for start, rows in zip(starts, requests.num_plan_rows, strict=False) for row in range(start, start + rows)
    ]
