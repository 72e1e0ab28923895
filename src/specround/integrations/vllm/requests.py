"""`RequestTable`: what the round keeps of each request beside vLLM's own state, by vLLM's persistent slot."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import AcceptResult, SamplingView


class RequestTable:
    """Persistent tensors of the requests; row `max_num_seqs` belongs to nobody.

    Args:
        max_num_seqs: vLLM's slots.
        max_model_len: Longest request, in tokens.
        num_drafts: K, columns of the draft buffer.
        device: Where the tensors live.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, num_drafts: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.token_history = torch.zeros(rows, max_model_len + 2, dtype=torch.int64, device=device)
        """The last column takes writes that belong nowhere."""
        self.draft_token_ids = torch.full((rows, num_drafts), -1, dtype=torch.int64, device=device)
        self.limits = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sampling = SamplingView(temperature=torch.zeros(rows, dtype=torch.float32, device=device))
        self.temperature_cpu, self.limits_cpu = [0.0] * rows, [0] * rows
        """Host copies, so that a step reads nothing from the device."""
        self.max_kv_len = 0
        """Upper bound of the slots that any row sees until the next step is planned."""
        self.request_ids: dict[str, int] = {}
        """Slot of each request."""
        self.plain: set[str] = set()
        """Requests that verify no drafts, because their sampling parameters need a history for every row."""

    def start(self, request_id: str, req_idx: int, token_ids: list[int], limit: int) -> None:
        """Fill a request's row.

        Args:
            request_id: The request.
            req_idx: Its slot.
            token_ids: Prompt, and what was generated before a preemption.
            limit: Most tokens, prompt and output.
        """
        self.request_ids[request_id] = req_idx
        self.token_history[req_idx, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        self.draft_token_ids[req_idx] = -1
        self.limits_cpu[req_idx] = min(limit, self.max_model_len)
        self.limits[req_idx] = self.limits_cpu[req_idx]

    def set_sampling(self, req_idx: int, temperature: float, seed: int) -> None:
        """Set what a request is sampled with."""
        self.sampling.temperature[req_idx] = self.temperature_cpu[req_idx] = temperature
        self.seeds[req_idx] = seed

    def forget(self, request_id: str) -> int | None:
        """Empty a request's row; the slot, or None for an unknown request."""
        req_idx = self.request_ids.pop(request_id, None)
        self.plain.discard(request_id)
        if req_idx is not None:
            self.draft_token_ids[req_idx] = -1
        return req_idx

    def apply(self, req_idx: Tensor, root_position: Tensor, result: AcceptResult) -> None:
        """Append a step's committed tokens.

        Args:
            req_idx: `[R]` int64.
            root_position: `[R]` int64.
            result: What was accepted.
        """
        place = torch.arange(result.path.shape[1], device=req_idx.device)
        kept = place < result.num_committed[:, None]
        dump = self.token_history.shape[1] - 1
        column = torch.where(kept, (root_position[:, None] + 1 + place).clamp(max=dump), dump)
        self.token_history[req_idx[:, None], column] = result.token_ids
