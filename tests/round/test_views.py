"""The round's own row arithmetic on batches made by hand: plan view, layout, processed logits, rows after commit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specround.contract import AcceptResult, SamplingView, VerifyPlan
from specround.round import RoundBatch, StepShape
from specround.round.acceptance import process_logits
from specround.round.commit import commit_rows
from specround.round.layout import PlanLayout, lay_out

BLOCK = 4


@pytest.fixture
def batch() -> RoundBatch:
    """Three requests: a chunk of 3 rows that ends nothing, a prefill whose last 2 of 5 tokens end it, a decode of 4."""
    history = torch.arange(5 * 20).view(5, 20)
    return RoundBatch(
        shape=StepShape(num_rows=(3, 2, 4), num_plan_rows=(0, 1, 4), kv_bounds=(5, 5, 11), num_sampled_rows=4),
        req_idx=torch.tensor([3, 0, 2]),
        row_start=torch.tensor([0, 3, 5, 9], dtype=torch.int32),
        root_row=torch.tensor([3, 4, 5], dtype=torch.int32),
        logits_start=torch.tensor([0, 0, 1, 5], dtype=torch.int32),
        sampled_rows=torch.tensor([1, 2, 3, 4]),
        max_rows=torch.tensor([0, 1, 4], dtype=torch.int32),
        num_computed_tokens=torch.tensor([2, 3, 7], dtype=torch.int32),
        root_position=torch.tensor([5, 4, 7]),
        root_token_ids=torch.tensor([-1, 4, 47]),
        token_history=history,
        draft_token_ids=torch.full((5, 3), -1),
        block_tables=torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 0]]),
        block_size=BLOCK,
        sampling=SamplingView(temperature=torch.tensor([0.0, 9.0, 0.5, 9.0, 9.0])),
        seeds=torch.arange(5),
        budget=4,
    )


@pytest.fixture
def layout(batch: RoundBatch) -> PlanLayout:
    """The decode verifies a tree: two children of its root and a grandchild under the second."""
    plan = VerifyPlan(
        token_ids=torch.tensor([[-1, -1, -1, -1], [-1, -1, -1, -1], [-1, 60, 61, 62]]),
        num_candidates=torch.tensor([0, 1, 4], dtype=torch.int32),
        parents=torch.tensor([[-1] * 4, [-1] * 4, [-1, 0, 0, 2]], dtype=torch.int32),
    )
    return lay_out(plan, batch)


def test_plan_view_repeats_the_batch(batch: RoundBatch) -> None:
    """Each field of PlanView is the batch's, and C the most plan rows of any request."""
    view = batch.plan_view()
    names = ("req_idx", "num_computed_tokens", "root_token_ids", "max_rows", "token_history", "sampling", "seeds")
    for name in (*names, "budget", "draft_token_ids"):
        assert getattr(view, name) is getattr(batch, name)
    assert view.num_columns == 4


def test_layout(layout: PlanLayout) -> None:
    """Ids, positions, slots and token indices of every row: chunk rows by the history, plan rows by the plan."""
    assert layout.batch_idx.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert layout.input_ids.tolist() == [62, 63, 64, 3, 4, 47, 60, 61, 62]
    assert layout.positions.tolist() == [2, 3, 4, 3, 4, 7, 8, 8, 9]
    assert layout.slots.tolist() == [6, 7, 8, 15, 16, 27, 28, 29, 30]
    assert layout.logits_rows.tolist() == [4, 5, 6, 7, 8]
    assert layout.logits_batch_idx.tolist() == [1, 2, 2, 2, 2]
    assert layout.token_index.tolist() == [5, 8, 9, 9, 10]
    assert layout.plan.token_ids[:, 0].tolist() == [-1, 4, 47], "the engine writes the roots"


def test_processed_logits(batch: RoundBatch, layout: PlanLayout) -> None:
    """Rows of sampled requests are divided by their temperature, greedy ones are not; the raw ones stay reachable."""
    raw = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    kept = raw.clone()
    output = process_logits(raw, layout, batch)
    assert torch.equal(output.raw_logits, kept)
    assert torch.equal(output.logits, torch.cat([kept[:1], kept[1:] / 0.5]))
    assert output.row_start.tolist() == [0, 0, 1, 5]
    assert output.root_row.tolist()[1:] == [0, 1]
    assert output.req_idx is batch.req_idx
    assert output.sampling is batch.sampling
    assert output.seeds is batch.seeds


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ([0], [5]),
        ([0, 1], [5, 6]),
        ([0, 2], [5, 7]),
        ([0, 2, 3], [5, 7, 8]),
    ],
)
def test_rows_after_commit(path: list[int], rows: list[int], batch: RoundBatch, layout: PlanLayout) -> None:
    """The path's ids and hidden states stand in chain order from the root's row, others are marked with position -1."""
    padding = [-1] * (4 - len(path))
    result = AcceptResult(
        path=torch.tensor([[-1] * 4, [0, -1, -1, -1], path + padding], dtype=torch.int32),
        num_committed=torch.tensor([0, 1, len(path)], dtype=torch.int32),
        token_ids=torch.tensor([[-1] * 4, [9, -1, -1, -1], [9] * len(path) + padding]),
    )
    hidden = torch.arange(9.0)[:, None] * 10 + torch.arange(2.0)
    committed: Any = commit_rows(layout, result, batch, hidden)
    count = len(path)
    assert committed.input_ids[:5].tolist() == [62, 63, 64, 3, 4]
    assert committed.input_ids[5 : 5 + count].tolist() == [layout.input_ids[row] for row in rows]
    assert committed.positions.tolist() == [2, 3, 4, 3, 4, *range(7, 7 + count), *[-1] * (4 - count)]
    assert torch.equal(committed.hidden_states[:5], hidden[:5])
    assert torch.equal(committed.hidden_states[5 : 5 + count], hidden[rows])
    assert commit_rows(layout, result, batch, None).hidden_states is None
