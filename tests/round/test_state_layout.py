"""`lay_out_states`: levels, chunks, blocks and slots of a step, against plain loops."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import specround.round.state_layout as state_layout_module
from specround.contract import SamplingView, VerifyPlan
from specround.kernels.state_commit import StateTables
from specround.kernels.state_rows import StateMode, StateRows
from specround.kernels.tree import tree_tables
from specround.round import RoundBatch, StepShape
from specround.round.layout import lay_out

CPU = torch.device("cpu")


def random_step(seed: int, mode: StateMode, *, tree: bool) -> tuple[VerifyPlan, RoundBatch, StateTables]:
    """A step that mixes prefill chunks, prefills that end, and decodes with 0 to K drafts, some rows unused."""
    source = random.Random(seed)
    drafts, count = source.choice([1, 3, 6]), source.randint(1, 5)
    rows, plan_rows, used = [], [], []
    for _ in range(count):
        kind = source.choice(["chunk", "end", "decode", "decode"])
        plan = {"chunk": 0, "end": 1}.get(kind, source.randint(1, drafts + 1))
        rows.append(plan + (source.randint(1, 6) if kind != "decode" else 0))
        plan_rows.append(plan)
        used.append(min(plan, source.randint(1, drafts + 1)))
    shape = StepShape(num_rows=tuple(rows), num_plan_rows=tuple(plan_rows), kv_bounds=(32,) * count, num_sampled_rows=0)
    columns = shape.num_columns
    parents = torch.tensor([[-1] + [source.randint(0, c - 1) for c in range(1, columns)] for _ in range(count)]).int()
    plan = VerifyPlan(
        token_ids=torch.ones(count, columns, dtype=torch.int64),
        num_candidates=torch.tensor(used, dtype=torch.int32),
        parents=parents if tree else None,
    )
    tables = StateTables(mode, 8, drafts, CPU)
    req_idx = source.sample(range(7), count)
    for r in req_idx:
        tables.start(r, [1 + r * tables.span + i for i in range(tables.span)])
        tables.parity[r] = source.randint(0, 1)
        length = source.randint(0, drafts)
        tables.pending_len[r] = length
        tables.pending_path[r, :length] = torch.tensor(sorted(source.sample(range(1, drafts + 1), length)))
    start = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    batch = RoundBatch(
        shape=shape,
        req_idx=torch.tensor(req_idx),
        row_start=start,
        root_row=start[1:] - torch.tensor(plan_rows, dtype=torch.int32),
        logits_start=torch.tensor([0, *torch.tensor(plan_rows).cumsum(0).tolist()], dtype=torch.int32),
        sampled_rows=torch.zeros(0, dtype=torch.int64),
        max_rows=torch.tensor(plan_rows, dtype=torch.int32),
        num_computed_tokens=torch.zeros(count, dtype=torch.int32),
        root_position=torch.tensor([n - p for n, p in zip(rows, plan_rows, strict=True)]),
        root_token_ids=torch.ones(count, dtype=torch.int64),
        token_history=torch.ones(8, 40, dtype=torch.int64),
        draft_token_ids=torch.ones(8, drafts, dtype=torch.int64),
        block_tables=torch.ones(count, 8, dtype=torch.int64),
        block_size=16,
        sampling=SamplingView(temperature=torch.zeros(8)),
        seeds=torch.zeros(8, dtype=torch.int64),
        budget=drafts + 1,
        states=tables,
    )
    return plan, batch, tables


def states_of(plan: VerifyPlan, batch: RoundBatch) -> StateRows:
    states = lay_out(plan, batch).states
    assert states is not None
    return states


def trace(states: StateRows) -> dict[int, tuple[str, int]]:
    """Row to where its state comes from: ("request", r) or ("row", packed row)."""
    walked: list[int] = []
    found = {}
    for level in states.levels:
        for row, source in zip(level.rows.tolist(), level.sources.tolist(), strict=True):
            requests = states.num_requests
            found[row] = ("request", source) if source < requests else ("row", walked[source - requests])
        walked += level.rows.tolist()
    return found


def expected_sources(plan: VerifyPlan, batch: RoundBatch) -> dict[int, tuple[str, int]]:
    expected = {}
    for r, root in enumerate(batch.root_row.tolist()):
        for column in range(int(plan.num_candidates[r])):
            parent = column - 1 if plan.parents is None else int(plan.parents[r, column])
            expected[root + column] = ("request", r) if column == 0 else ("row", root + parent)
    return expected


CASES = [(seed, mode, tree) for seed in range(25) for mode in ("slots", "replay") for tree in (False, True)]


@pytest.mark.parametrize(("seed", "mode", "tree"), CASES)
def test_states_of_a_step(seed: int, mode: StateMode, tree: bool) -> None:
    """Every used row starts from its parent, and blocks, slots, chunks and last rows are those of plain loops."""
    plan, batch, tables = random_step(seed, mode, tree=tree)
    states = states_of(plan, batch)
    assert trace(states) == expected_sources(plan, batch)
    chunk_rows = {}
    for group in states.chunks:
        for r, rows in zip(group.requests.tolist(), group.rows.tolist(), strict=True):
            chunk_rows[r] = [row for row in rows if row < states.num_rows]
    blocks, slots = [0] * states.num_rows, [0] * states.num_rows
    for r, (start, root) in enumerate(zip(batch.row_start.tolist(), batch.root_row.tolist(), strict=False)):
        used, req = int(plan.num_candidates[r]), int(batch.req_idx[r])
        assert chunk_rows.get(r, []) == list(range(start, root))
        assert int(states.last_row[r]) == (root if used else root - 1 if root > start else states.num_rows)
        assert int(states.committed_block[r]) == int(tables.blocks[req, 0])
        for column in range(1, used):
            half = 1 - int(tables.parity[req])
            blocks[root + column] = int(tables.blocks[req, column]) if mode == "slots" else 0
            slots[root + column] = 1 + (half * 8 + req) * tables.max_drafts + column - 1
        if mode == "replay":
            assert states.pending is not None
            length = int(tables.pending_len[req])
            kept = [
                1 + (int(tables.parity[req]) * 8 + req) * tables.max_drafts + c - 1
                for c in tables.pending_path[req, :length].tolist()
            ]
            assert states.pending.slots[r].tolist() == kept + [0] * (states.pending.slots.shape[1] - length)
    found = states.row_block if mode == "slots" else states.row_slot
    assert found is not None
    assert found.tolist() == (blocks if mode == "slots" else slots)


@pytest.mark.parametrize(("seed", "mode", "tree"), CASES[:40])
def test_levels_by_column_say_the_same(seed: int, mode: StateMode, tree: bool, monkeypatch: Any) -> None:
    """The levels of devices whose depths the host does not know have the same parents, beside rows that are unused."""
    plan, batch, _ = random_step(seed, mode, tree=tree)
    expected = trace(states_of(plan, batch))
    by_column = state_layout_module._levels_by_column

    def levels(plan: VerifyPlan, root_row: torch.Tensor, depth: torch.Tensor | None) -> Any:
        row_end = batch.row_start[1:].to(torch.int64)
        return by_column(plan, batch.shape, root_row, row_end - root_row)

    monkeypatch.setattr(state_layout_module, "_levels_by_depth", levels)
    found = trace(states_of(plan, batch))
    assert {row: found[row] for row in expected} == expected


def test_taps_follow_parents() -> None:
    """Taps are the row, its ancestors, then the request's window, oldest first."""
    plan, batch, _ = random_step(3, "replay", tree=True)
    states, width = states_of(plan, batch), 4
    for row in range(states.num_rows):
        request, entries = int(states.row_request[row]), width - 1
        taps, at, missing = [], row, 0
        for _ in range(width):
            if at >= 0:
                taps.append(states.num_requests * entries + at)
                at = int(states.parents[at])
            else:
                missing += 1
                taps.append(request * entries + entries - missing)
        assert states.taps(width)[row].tolist() == taps[::-1]


def test_depths_are_tree_depths() -> None:
    """On a CPU a tree is walked in as many levels as it is deep."""
    plan, batch, _ = random_step(7, "replay", tree=True)
    assert plan.parents is not None
    depth, used = tree_tables(plan.parents).depth, plan.num_candidates
    deepest = max(int(depth[r, : int(n)].max()) for r, n in enumerate(used) if n)
    assert len(states_of(plan, batch).levels) == deepest + 1
