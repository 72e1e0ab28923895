"""`StateRows` from plain Python: requests with chunks, trees, unused rows, pending paths and snapshots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tree_oracles import depth_of

from specround.kernels.state_rows import ChunkGroup, PendingPath, StateLevel, StateMode, StateRows


@dataclass
class StateRequest:
    """A request of a step.

    Attributes:
        block: Its state block; 0 = a padded request.
        chunk: Rows before the root.
        parents: Parents of its plan rows, the root's -1; empty = this step has no root.
        unused: Physical rows after them that mean nothing.
        drafts: Where drafts are kept, by column from 1: blocks (mode "slots") or slots ("replay"); missing ones are 0.
        pending: Slots of the pending path.
        snapshot: After how many pending drafts to store a snapshot, and its block.
    """

    block: int
    chunk: int = 0
    parents: list[int] = field(default_factory=list)
    unused: int = 0
    drafts: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    snapshot: tuple[int, int] = (0, 0)

    @property
    def num_used(self) -> int:
        return self.chunk + len(self.parents)

    @property
    def num_rows(self) -> int:
        return self.num_used + self.unused

    @property
    def row_parents(self) -> list[int]:
        """Parent of each used row, counted from the request's first row."""
        plan = [self.chunk - 1 if parent < 0 else self.chunk + parent for parent in self.parents]
        return list(range(-1, self.chunk - 1)) + plan


def first_rows(requests: list[StateRequest]) -> list[int]:
    """Packed row where each request begins, and the number of rows."""
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.num_rows)
    return starts


def build_rows(requests: list[StateRequest], mode: StateMode, seed: int = 0, spare_places: int = 1) -> StateRows:
    """Rows of a step: a level per depth, or per column of all requests, padded with N.

    Unused rows stand in levels or not, with sources that mean nothing.

    Args:
        requests: Batch order.
        mode: State mode.
        seed: Of the choices that must not matter.
        spare_places: Places of `pending.slots` past the longest path.
    """
    starts, total = first_rows(requests), first_rows(requests)[-1]
    parents, owner, kept = [], [], [0] * total
    for r, request in enumerate(requests):
        first = starts[r]
        parents += [first + parent if parent >= 0 else -1 for parent in request.row_parents]
        parents += [first] * request.unused
        owner += [r] * request.num_rows
        for column, where in enumerate(request.drafts[: max(len(request.parents) - 1, 0)], start=1):
            kept[first + request.chunk + column] = where
    last = [first + q.chunk + bool(q.parents) - 1 for first, q in zip(starts, requests, strict=False)]
    last = [row if q.num_used else total for row, q in zip(last, requests, strict=True)]
    return StateRows(
        mode=mode,
        num_rows=total,
        committed_block=_long([request.block for request in requests]),
        last_row=_long(last),
        row_request=_long(owner),
        parents=_long(parents),
        chunks=_chunks(requests, starts),
        levels=_levels(requests, starts, random.Random(seed)),
        row_block=_long(kept) if mode == "slots" else None,
        row_slot=_long(kept) if mode == "replay" else None,
        pending=_pending(requests, spare_places) if mode == "replay" else None,
    )


def _long(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _chunks(requests: list[StateRequest], starts: list[int]) -> tuple[ChunkGroup, ...]:
    by_size: dict[int, list[int]] = {}
    for r, request in enumerate(requests):
        if request.chunk:
            by_size.setdefault(request.chunk.bit_length(), []).append(r)
    groups = []
    for members in by_size.values():
        longest = max(requests[r].chunk for r in members)
        rows = [
            [starts[r] + i if i < requests[r].chunk else starts[-1] for i in range(longest)] for r in reversed(members)
        ]
        groups.append(ChunkGroup(requests=_long(members[::-1]), rows=_long(rows)))
    return tuple(groups)


def _levels(requests: list[StateRequest], starts: list[int], rng: random.Random) -> tuple[StateLevel, ...]:
    by_column = rng.random() < 0.5
    steps: dict[int, list[tuple[int, int]]] = {}  # (row, parent's row, or -1 - request for the state before its root)
    columns = max((len(request.parents) for request in requests), default=0)
    for r, request in enumerate(requests):
        first = starts[r] + request.chunk
        for column, parent in enumerate(request.parents):
            level = column if by_column else depth_of(request.parents, column)
            steps.setdefault(level, []).append((first + column, -1 - r if parent < 0 else first + parent))
        for column in range(len(request.parents), columns if by_column else 0):
            steps.setdefault(column, []).append((starts[-1], -1 - r))
        for row in range(starts[r] + request.num_used, starts[r + 1]):
            if rng.random() < 0.7 and steps:
                steps[rng.choice(list(steps))].append((row, -1 - rng.randrange(len(requests))))
    place: dict[int, int] = {}
    levels: list[StateLevel] = []
    walked = len(requests)
    for level in sorted(steps):
        order = rng.sample(steps[level], len(steps[level]))
        sources = [-1 - parent if parent < 0 else place[parent] for _, parent in order]
        place |= {row: walked + i for i, (row, _) in enumerate(order)}
        walked += len(order)
        levels.append(StateLevel(rows=_long([row for row, _ in order]), sources=_long(sources)))
    return tuple(levels)


def _pending(requests: list[StateRequest], spare_places: int) -> PendingPath:
    places = max((len(request.pending) for request in requests), default=0) + spare_places
    return PendingPath(
        slots=torch.tensor(
            [request.pending + [0] * (places - len(request.pending)) for request in requests], dtype=torch.int64
        ).view(len(requests), places),
        length=_long([len(request.pending) for request in requests]),
        snapshot_after=_long([request.snapshot[0] for request in requests]),
        snapshot_block=_long([request.snapshot[1] for request in requests]),
    )
