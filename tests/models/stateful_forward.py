"""Run a model with recurrent layers outside the engine: prompts in chunks, trees, and commits, in both state modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from packed_forward import BLOCK, PackedForward
from torch import Tensor

from specround.kernels.registry import KernelRegistry
from specround.kernels.state_rows import ChunkGroup, PendingPath, StateLevel, StateMode, StateRows
from specround.kernels.tree import tree_tables


@dataclass
class Rows:
    """A request's rows in a step: so many before the root, then a tree; no tree = the step ends before the root."""

    chunk: int
    parents: list[int]


class StatefulForward(PackedForward):
    """A model with state blocks and row slots for `count` requests and `drafts` drafts each.

    Nothing here is the engine's: states are laid out by hand from what `StateRows` says that it means.
    """

    def __init__(
        self,
        path: str | Path,
        count: int,
        longest: int,
        mode: StateMode,
        drafts: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(path, count, longest, dtype, mode)
        self.mode, self.drafts = mode, drafts
        each = 1 + drafts if mode == "slots" else 1
        shuffled = torch.randperm(count * each, generator=torch.Generator().manual_seed(2)) + 1
        self.blocks = shuffled.view(count, each).tolist()
        slots = 1 + 2 * count * drafts if mode == "replay" else 0
        self.model.bind_states(KernelRegistry(()), 1 + count * each, slots)
        self.pending: list[list[int]] = [[] for _ in range(count)]
        self.parity = 0
        self.tree: list[list[int]] = []

    @torch.no_grad()
    def feed(self, requests: Sequence[Sequence[int]], start: Sequence[int], roots: Sequence[bool]) -> Tensor:
        """Logits of tokens that stand at `start[r] ...`; a request's last token is a root where `roots` says so."""
        counts = [len(tokens) for tokens in requests]
        index = torch.cat([torch.arange(s, s + n) for s, n in zip(start, counts, strict=True)])
        rows = [Rows(n - 1, [-1]) if root else Rows(n, []) for n, root in zip(counts, roots, strict=True)]
        return self._forward(requests, index, index, index + 1, None, None, list(start), self.lay_out(rows))

    @torch.no_grad()
    def verify_tree(
        self,
        trees: Sequence[Sequence[int]],
        parents: Tensor,
        root: Sequence[int],
        state_parents: Tensor | None = None,
    ) -> Tensor:
        """Logits `[R, C, V]` of trees; `state_parents` are what the recurrent layers are told, for controls."""
        columns, tables = parents.shape[1], tree_tables(parents)
        roots = torch.tensor(root).repeat_interleave(columns)
        depth = tables.depth.to(torch.int64)
        self.tree = (parents if state_parents is None else state_parents).tolist()
        states = self.lay_out([Rows(0, row) for row in self.tree])
        slots = roots + torch.arange(columns).repeat(len(trees))
        bits = tables.ancestors.flatten()
        logits = self._forward(trees, roots + depth.flatten(), slots, roots, bits, depth, list(root), states)
        return logits.view(len(trees), columns, -1)

    def commit(self, paths: Sequence[Sequence[int]], root: Sequence[int]) -> None:
        """Keep the columns of each path, which begins with 0: KV goes to the chain's slots, states are taken over."""
        for request, path in enumerate(paths):
            for depth, column in enumerate(path):
                source, target = self._slot(request, root[request] + column), self._slot(request, root[request] + depth)
                for pair in self.cache.layers:
                    for cache in pair:
                        cache[target] = cache[source]
            if len(path) > 1 and self.mode == "slots":
                blocks, last = self.blocks[request], path[-1]
                blocks[0], blocks[last] = blocks[last], blocks[0]
            elif self.mode == "replay":
                self.pending[request] = [self._row_slot(request, column, self.parity) for column in path[1:]]

    def lay_out(self, requests: list[Rows]) -> StateRows:
        """`StateRows` of a step; afterwards nothing is pending."""
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + request.chunk + len(request.parents))
        total, parents, owner, last, drafts = starts[-1], [], [], [], []
        self.parity = 1 - self.parity
        for r, (request, first) in enumerate(zip(requests, starts, strict=False)):
            root = first + request.chunk
            parents += [row - 1 if row > first else -1 for row in range(first, root)]
            parents += [root + p if p >= 0 else (root - 1 if request.chunk else -1) for p in request.parents]
            owner += [r] * (starts[r + 1] - first)
            last.append(root if request.parents else root - 1 if request.chunk else total)
            columns = range(1, len(request.parents))
            drafts += [0] * (request.chunk + bool(request.parents))
            if self.mode == "slots":
                drafts += [self.blocks[r][column] for column in columns]
            else:
                drafts += [self._row_slot(r, column, self.parity) for column in columns]
        pending, self.pending = self.pending, [[] for _ in self.pending]
        kept = torch.tensor(drafts)
        return StateRows(
            mode=self.mode,
            num_rows=total,
            committed_block=torch.tensor([self.blocks[r][0] for r in range(len(requests))]),
            last_row=torch.tensor(last),
            row_request=torch.tensor(owner),
            parents=torch.tensor(parents),
            chunks=_chunks(requests, starts),
            levels=_levels(requests, starts),
            row_block=kept if self.mode == "slots" else None,
            row_slot=kept if self.mode == "replay" else None,
            pending=_pending(pending[: len(requests)]) if self.mode == "replay" else None,
        )

    def _row_slot(self, request: int, column: int, parity: int) -> int:
        return 1 + (parity * len(self.pending) + request) * self.drafts + column - 1

    def _slot(self, request: int, index: int) -> int:
        return int(self.tables[request, index // BLOCK]) * BLOCK + index % BLOCK


def _chunks(requests: list[Rows], starts: list[int]) -> tuple[ChunkGroup, ...]:
    members = [r for r, request in enumerate(requests) if request.chunk]
    if not members:
        return ()
    longest = max(requests[r].chunk for r in members)
    rows = [[starts[r] + i if i < requests[r].chunk else starts[-1] for i in range(longest)] for r in members]
    return (ChunkGroup(requests=torch.tensor(members), rows=torch.tensor(rows)),)


def _levels(requests: list[Rows], starts: list[int]) -> tuple[StateLevel, ...]:
    by_depth: dict[int, list[tuple[int, int, int]]] = {}
    for r, request in enumerate(requests):
        depth: list[int] = []
        for column, parent in enumerate(request.parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            by_depth.setdefault(depth[column], []).append((r, column, parent))
    place: dict[tuple[int, int], int] = {}
    levels = []
    for level in sorted(by_depth):
        rows = [starts[r] + requests[r].chunk + column for r, column, _ in by_depth[level]]
        sources = [r if parent < 0 else len(requests) + place[r, parent] for r, _, parent in by_depth[level]]
        for r, column, _ in by_depth[level]:
            place[r, column] = len(place)
        levels.append(StateLevel(rows=torch.tensor(rows), sources=torch.tensor(sources)))
    return tuple(levels)


def _pending(paths: list[list[int]]) -> PendingPath:
    longest = max((len(path) for path in paths), default=0)
    slots = [path + [0] * (longest - len(path)) for path in paths]
    return PendingPath(
        slots=torch.tensor(slots, dtype=torch.int64).view(len(paths), longest),
        length=torch.tensor([len(path) for path in paths]),
    )
