"""State commit: tables against dictionaries over many rounds, in both modes."""

from __future__ import annotations

import random

import pytest
import torch

from specround.contract import AcceptResult
from specround.kernels.state_commit import StateTables, commit_states
from specround.kernels.state_rows import StateMode

CPU = torch.device("cpu")


def result_of(paths: list[list[int]], columns: int) -> AcceptResult:
    path = torch.full((len(paths), columns), -1, dtype=torch.int32)
    for row, kept in zip(path, paths, strict=True):
        row[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    num_committed = torch.tensor([len(kept) for kept in paths], dtype=torch.int32)
    return AcceptResult(path=path, num_committed=num_committed, token_ids=path.to(torch.int64))


def draw_path(source: random.Random, columns: int) -> list[int]:
    """A path from column 0, sometimes of a request without candidates."""
    if source.random() < 0.15:
        return []
    return [0, *sorted(source.sample(range(1, columns), source.randint(0, columns - 1)))]


def start_all(tables: StateTables) -> None:
    for req_idx in range(tables.num_requests - 1):
        tables.start(req_idx, [1 + req_idx * tables.span + i for i in range(tables.span)])


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_slots_commit_the_block_of_the_last_row(drafts: int) -> None:
    """The committed block is the one that held the path's last row, and every request keeps exactly its blocks."""
    source, tables = random.Random(drafts), StateTables("slots", 5, drafts, CPU)
    start_all(tables)
    owned = [set(row.tolist()) for row in tables.blocks]
    for _ in range(40):
        step = source.sample(range(4), source.randint(1, 4))
        paths = [draw_path(source, drafts + 1) for _ in step]
        expected = [int(tables.blocks[r, path[-1] if path else 0]) for r, path in zip(step, paths, strict=True)]
        commit_states(tables, torch.tensor(step), result_of(paths, drafts + 1))
        assert [int(tables.blocks[r, 0]) for r in step] == expected
        assert [set(row.tolist()) for row in tables.blocks] == owned
    assert tables.blocks[4].tolist() == [0] * (drafts + 1), "the null request has the null block only"


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_replay_keeps_the_accepted_drafts_until_the_next_round(drafts: int) -> None:
    """Pending are the drafts of the last path, oldest first, in the half of the buffers that the round wrote."""
    source, tables = random.Random(drafts), StateTables("replay", 5, drafts, CPU)
    start_all(tables)
    pending: dict[int, list[int]] = {r: [] for r in range(5)}
    parity = dict.fromkeys(range(5), 0)
    for _ in range(40):
        columns = source.randint(1, drafts) + 1
        step = source.sample(range(4), source.randint(1, 4))
        paths = [draw_path(source, columns) for _ in step]
        commit_states(tables, torch.tensor(step), result_of(paths, columns))
        for r, path in zip(step, paths, strict=True):
            pending[r], parity[r] = path[1:], 1 - parity[r]
        for r in range(5):
            length = int(tables.pending_len[r])
            assert tables.pending_path[r, :length].tolist() == pending[r]
            assert int(tables.parity[r]) == parity[r]


@pytest.mark.parametrize("mode", ["slots", "replay"])
def test_the_null_request_may_be_there_twice(mode: StateMode) -> None:
    """Padding changes the null request's row only."""
    tables = StateTables(mode, 3, 2, CPU)
    start_all(tables)
    before = tables.blocks[:2].clone()
    commit_states(tables, torch.tensor([2, 2, 2]), result_of([[], [], []], 3))
    assert torch.equal(tables.blocks[:2], before)
    assert tables.pending_len.tolist() == [0, 0, 0]
    assert tables.blocks[2].tolist() == [0] * tables.span


def test_row_slots_are_distinct() -> None:
    """Requests, halves and columns never share a slot, none is the null slot, and all fit."""
    tables = StateTables("replay", 3, 4, CPU)
    slots = [
        int(tables.row_slots(torch.tensor(r), torch.tensor(parity), torch.tensor(column)))
        for r in range(3)
        for parity in (0, 1)
        for column in range(1, 5)
    ]
    assert sorted(slots) == list(range(1, tables.num_row_slots))


@pytest.mark.parametrize("mode", ["slots", "replay"])
def test_a_new_owner_sees_nothing(mode: StateMode) -> None:
    """Leaving takes the blocks, starting gives new ones, and nothing stays pending."""
    tables = StateTables(mode, 3, 2, CPU)
    start_all(tables)
    commit_states(tables, torch.tensor([1]), result_of([[0, 1, 2]], 3))
    tables.leave(1)
    assert tables.blocks[1].tolist() == [0] * tables.span
    tables.start(1, list(range(7, 7 + tables.span)))
    assert tables.blocks[1].tolist() == list(range(7, 7 + tables.span))
    assert int(tables.pending_len[1]) == 0
