"""`TreeDrafts`: a tree speculator's drafts by request slot, and the plan made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import PlanView, VerifyPlan


class TreeDrafts:
    """Drafts of every request slot on the device, columns in topological order, column 0 the root.

    Buffers keep their addresses. Because parents come before their children, the leading columns of a draft tree are a
    draft tree, so a smaller budget simply cuts columns.

    Args:
        num_slots: Request slots, the padding slot included.
        max_candidates: C, columns.
        device: Where the buffers live.
    """

    def __init__(self, num_slots: int, max_candidates: int, device: torch.device) -> None:
        def buffer(dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots, max_candidates), -1, dtype=dtype, device=device)

        self.token_ids, self.parents = buffer(torch.int64), buffer(torch.int32)
        """`[num_slots, C]`, -1 = no draft; and the parent column of each."""
        self._plan_token_ids, self._plan_parents = buffer(torch.int64).view(-1), buffer(torch.int32).view(-1)
        self._plan_num_candidates = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def clear(self, req_idx: int) -> None:
        """Forget a slot's drafts: its next plan is the root alone."""
        self.token_ids[req_idx].fill_(-1)

    def write(self, req_idx: Tensor, token_ids: Tensor, parents: Tensor) -> None:
        """Set the drafts of some slots.

        Args:
            req_idx: `[R]` int64.
            token_ids: `[R, C]` int64; column 0 is ignored, drafts are a prefix of the other columns.
            parents: `[R, C]` int32.
        """
        self.token_ids.index_copy_(0, req_idx, token_ids)
        self.parents.index_copy_(0, req_idx, parents)

    def plan(self, view: PlanView, *, as_chain: bool = False) -> VerifyPlan:
        """The step's plan, cut to its columns.

        Args:
            view: The step.
            as_chain: The drafts are chains and the plan must say so.
        """
        count, columns = view.req_idx.shape[0], view.num_columns
        drafts = self.token_ids.index_select(0, view.req_idx)[:, :columns]
        token_ids = self._plan_token_ids[: count * columns].view(count, columns)
        token_ids.copy_(drafts)
        token_ids[:, 0].copy_(view.root_token_ids)
        num_candidates = self._plan_num_candidates[:count]
        drafted = (drafts[:, 1:] >= 0).to(torch.int32).cumprod(1).sum(1)
        num_candidates.copy_((drafted + 1).minimum(view.max_rows))
        unused = torch.arange(columns, device=drafts.device) >= num_candidates[:, None]
        token_ids.masked_fill_(unused, -1)
        if as_chain:
            return VerifyPlan(token_ids, num_candidates)
        parents = self._plan_parents[: count * columns].view(count, columns)
        parents.copy_(self.parents.index_select(0, view.req_idx)[:, :columns]).masked_fill_(unused, -1)
        return VerifyPlan(token_ids, num_candidates, parents)
