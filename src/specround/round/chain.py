"""The chain plan: what is verified when a speculator does not plan."""

from __future__ import annotations

import torch

from specround.contract import PlanView, VerifyPlan


def chain_plan(view: PlanView) -> VerifyPlan:
    """A chain of the engine's own draft buffer: each request's leading drafts, as far as its rows reach."""
    drafts = view.draft_token_ids.index_select(0, view.req_idx)[:, : view.num_columns - 1]
    leading = (drafts >= 0).to(torch.int32).cumprod(1).sum(1).to(torch.int32)
    token_ids = torch.full((view.req_idx.shape[0], view.num_columns), -1, dtype=torch.int64, device=drafts.device)
    token_ids[:, 0] = view.root_token_ids
    token_ids[:, 1 : drafts.shape[1] + 1] = drafts
    num_candidates = torch.minimum(leading + 1, view.max_rows)
    unused = torch.arange(view.num_columns, device=drafts.device) >= num_candidates[:, None]
    return VerifyPlan(token_ids=token_ids.masked_fill_(unused, -1), num_candidates=num_candidates)
