"""`DeviceState`: per-request state that lives on the device, indexed by `req_idx`."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import AcceptResult, SamplingView
from specround.engine.messages import BlockUpdate, StartedRequest
from specround.engine.staging import Uploader


class DeviceState:
    """Persistent tensors with fixed addresses. Row `max_num_seqs` is the null request that padding uses.

    Args:
        max_num_seqs: Requests at once.
        max_model_len: Longest request, in tokens.
        num_drafts: K, columns of the draft buffer.
        block_size: Tokens per block.
        device: Where the tensors live.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, num_drafts: int, block_size: int, device: torch.device
    ) -> None:
        rows, self.null_req_idx = max_num_seqs + 1, max_num_seqs
        self.block_size, self.max_model_len = block_size, max_model_len

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.token_history = zeros(rows, max_model_len + 2)
        """`[rows, max_model_len + 2]`; the last column takes writes that belong nowhere."""
        self.num_computed_tokens = zeros(rows, dtype=torch.int32)
        self.limits = zeros(rows)
        self.block_tables = zeros(rows, -(-(max_model_len + 1) // block_size))
        self.num_allocated_slots = zeros(rows)
        self.seeds = zeros(rows)
        self.sampling = SamplingView(temperature=zeros(rows, dtype=torch.float32))
        self.draft_token_ids = torch.full((rows, num_drafts), -1, dtype=torch.int64, device=device)

    def start(self, request: StartedRequest, uploader: Uploader) -> None:
        """Fill a request's row; nothing of a former owner stays visible."""
        row = request.req_idx
        tokens = uploader.upload(request.token_ids)
        self.token_history[row, : tokens.shape[0]] = tokens
        self.num_computed_tokens[row].fill_(0)
        self.num_allocated_slots[row].fill_(0)
        self.block_tables[row].zero_()
        self.draft_token_ids[row].fill_(-1)
        self.limits[row].fill_(request.limit)
        self.seeds[row].fill_(request.seed - 2**64 if request.seed >= 2**63 else request.seed)
        self.sampling.temperature[row].fill_(request.temperature)

    def leave(self, req_idx: int) -> None:
        """Empty a row: its table names the null block only, so a late write touches no live state."""
        self.block_tables[req_idx].zero_()
        self.num_allocated_slots[req_idx].fill_(0)
        self.num_computed_tokens[req_idx].fill_(0)
        self.draft_token_ids[req_idx].fill_(-1)

    def append_blocks(self, updates: tuple[BlockUpdate, ...], uploader: Uploader) -> None:
        """Append blocks to table rows, all in one write."""
        width = self.block_tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        rows: list[int] = []
        slots: list[int] = []
        for update in updates:
            first = update.req_idx * width + update.start
            places += range(first, first + len(update.block_ids))
            blocks += update.block_ids
            rows.append(update.req_idx)
            slots.append((update.start + len(update.block_ids)) * self.block_size)
        if not places:
            return
        uploaded = uploader.upload((*places, *blocks, *rows, *slots))
        count, owners = len(places), len(rows)
        self.block_tables.view(-1).index_copy_(0, uploaded[:count], uploaded[count : 2 * count])
        ends = uploaded[2 * count :]
        self.num_allocated_slots.index_copy_(0, ends[:owners], ends[owners:])

    def apply(self, req_idx: Tensor, prefix_rows: Tensor, root_position: Tensor, result: AcceptResult) -> None:
        """Take in a step: append committed tokens and advance the counts.

        Args:
            req_idx: `[R]` int64.
            prefix_rows: `[R]` int64, prompt rows before the root.
            root_position: `[R]` int64.
            result: What was accepted.
        """
        place = torch.arange(result.path.shape[1], device=req_idx.device)
        kept = place < result.num_committed[:, None]
        dump = self.token_history.shape[1] - 1
        column = torch.where(kept, (root_position[:, None] + 1 + place).clamp(max=dump), dump)
        self.token_history[req_idx[:, None], column] = result.token_ids
        done = self.num_computed_tokens[req_idx] + prefix_rows.to(torch.int32) + result.num_committed
        self.num_computed_tokens.index_copy_(0, req_idx, done)
