"""Built-in acceptance: process logits, draw the target's token at every row, keep the longest agreeing path."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.contract import AcceptResult, VerifyOutput
from specround.kernels.acceptance.naive import SampledRows, accept_chain, accept_tree, draw_tokens
from specround.round.batch import RoundBatch
from specround.round.layout import PlanLayout


def process_logits(raw_logits: Tensor, layout: PlanLayout, batch: RoundBatch) -> VerifyOutput:
    """Apply each row's sampling parameters.

    Args:
        raw_logits: `[num_logits_rows, V]`.
        layout: The step's layout.
        batch: The step.
    """
    logits = raw_logits.float()
    if batch.shape.num_sampled_rows:
        temperature = batch.sampling.temperature[batch.req_idx[layout.logits_batch_idx]]
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return VerifyOutput(
        logits=logits,
        raw_logits=raw_logits,
        row_start=batch.logits_start,
        root_row=batch.logits_start[:-1],
        num_computed_tokens=batch.root_position.to(torch.int32),
        req_idx=batch.req_idx,
        sampling=batch.sampling,
        seeds=batch.seeds,
    )


def accept_match(layout: PlanLayout, output: VerifyOutput, batch: RoundBatch) -> AcceptResult:
    """The `match` rule: a child is accepted when it equals the token the target itself draws at its parent."""
    drawn = draw_tokens(output.logits, _sampled_rows(layout, batch))
    columns = layout.plan.num_columns
    place = batch.logits_start[:-1, None].to(torch.int64) + torch.arange(columns, device=drawn.device)
    if drawn.numel() == 0:
        by_column = torch.full_like(layout.plan.token_ids, -1)
    else:
        by_column = drawn[place.clamp(max=drawn.numel() - 1)]
    if layout.tables is None or layout.committable is None:
        return accept_chain(layout.plan, by_column)
    return accept_tree(layout.plan, layout.tables, layout.committable, by_column)


def _sampled_rows(layout: PlanLayout, batch: RoundBatch) -> SampledRows | None:
    if not batch.shape.num_sampled_rows:
        return None
    rows = batch.sampled_rows
    req_idx = batch.req_idx[layout.logits_batch_idx[rows]]
    scale = (batch.sampling.temperature[req_idx] > 0).to(torch.float32)
    return SampledRows(rows, batch.seeds[req_idx], layout.token_index[rows], scale)
