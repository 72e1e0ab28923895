"""Rounds of recurrent ops over poisoned caches, beside a float64 recurrence that follows every path token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from state_cases import StateRequest, build_rows, first_rows
from torch import Tensor
from tree_oracles import path_to

from specround.kernels.state_rows import StateMode, StateRows

NAN = float("nan")
Inputs = tuple[Tensor, ...]


class OpCase(Protocol):
    """An op with the shapes and weights of one layer."""

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype) -> Any:
        """A cache, allocated as users do."""

    def stored(self, cache: Any) -> Tensor:
        """`[B, ...]`, what the cache keeps per block."""

    def buffers(self, cache: Any) -> Inputs:
        """Its row buffers."""

    def draw_state(self, generator: torch.Generator) -> Tensor:
        """A state that some other tokens have left, float32."""

    def draw(self, rows: int, generator: torch.Generator) -> Inputs:
        """Inputs of packed rows, float32."""

    def call(self, inputs: Inputs, cache: Any, rows: StateRows) -> Tensor:
        """The op."""

    def fold(self, cache: Any, rows: StateRows) -> None:
        """Its flush."""

    def oracle(self, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and next state of one row, float64."""


def poison(op: OpCase, cache: Any) -> Any:
    """Fill a cache with NaN."""
    for tensor in (op.stored(cache), *op.buffers(cache)):
        tensor.fill_(NAN)
    return cache


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted value; infinite if anything is not finite."""
    if not found.isfinite().all():
        return float("inf")
    return float((found.double() - wanted).abs().max() / wanted.abs().max()) if wanted.numel() else 0.0


@dataclass
class Tracked:
    """A request between rounds.

    Attributes:
        state: What its tokens have left, float64, from the oracle.
        request: Its block, pending path and snapshot of the next step.
        path_states: Oracle's state after each pending draft.
    """

    state: Tensor
    request: StateRequest
    path_states: list[Tensor] = field(default_factory=list)


@dataclass
class Shape:
    """What one request does in a round."""

    chunk: int = 0
    parents: list[int] = field(default_factory=list)
    unused: int = 0
    padded: bool = False


class Rounds:
    """Rounds of a batch. `spoil` replaces the rows that an op is given, to break it on purpose.

    Args:
        op: Op under test.
        mode: State mode.
        num_requests: Live requests.
        seed: Of inputs, blocks and accepted paths.
        dtype: Of the states, and of the inputs.
        max_rows: Most drafts of a request and round.
    """

    def __init__(
        self,
        op: OpCase,
        mode: StateMode,
        num_requests: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        max_rows: int = 40,
    ) -> None:
        self.op, self.mode, self.dtype = op, mode, dtype
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        each = max_rows + 2
        self.num_blocks = 2 + num_requests * (each if mode == "slots" else 2)
        self.cache = poison(
            op, op.cache(self.num_blocks, 2 + 2 * num_requests * each if mode == "replay" else 0, dtype)
        )
        self.free_blocks = self.rng.sample(range(1, self.num_blocks), self.num_blocks - 1)
        self.num_slots = op.buffers(self.cache)[0].shape[0] if op.buffers(self.cache) else 0
        self.spoil: Callable[[StateRows], StateRows] = lambda rows: rows
        self.worst_output = self.worst_state = self.worst_snapshot = 0.0
        self.live = []
        for _ in range(num_requests):
            state = op.draw_state(self.generator)
            block = self.free_blocks.pop()
            op.stored(self.cache)[block] = state
            self.live.append(Tracked(state.double(), StateRequest(block)))

    def run(self, shapes: list[Shape]) -> None:
        """One step and a random accepted path of each request; padded requests stand at random places."""
        requests, tracked = self._requests(shapes)
        used = self._used_rows(requests)
        starts = first_rows(requests)
        inputs = tuple(x.to(self.dtype) for x in self.op.draw(starts[-1], self.generator))
        given = tuple(x.clone() for x in inputs)
        for x in given:
            x[[row for row in range(starts[-1]) if row not in used]] = NAN
        rows = build_rows(requests, self.mode, self.rng.randrange(10**6))
        before = self.op.stored(self.cache).clone()
        out = self.op.call(given, self.cache, self.spoil(rows))
        assert out.shape[0] == starts[-1]
        self._check_untouched(before, requests)
        for first, request, mine in zip(starts, requests, tracked, strict=False):
            if mine is not None:
                self._follow(mine, request, tuple(x[first : first + request.num_used] for x in inputs), out[first:])

    def flush(self) -> None:
        """Fold what is pending and compare every state with the oracle's."""
        if self.mode == "replay":
            requests = [mine.request for mine in self.live]
            idle = [StateRequest(q.block, pending=q.pending, snapshot=q.snapshot) for q in requests]
            self.op.fold(self.cache, self.spoil(build_rows([*idle, StateRequest(0)], "replay")))
            self._check_snapshots(idle, self.live)
            for mine in self.live:
                mine.request = StateRequest(mine.request.block)
        for mine in self.live:
            self._compare_state(mine.request.block, mine.state)

    def _requests(self, shapes: list[Shape]) -> tuple[list[StateRequest], list[Tracked | None]]:
        live = iter(self.live)
        requests: list[StateRequest] = []
        tracked: list[Tracked | None] = []
        slots = self._free_slots()
        for shape in shapes:
            mine = None if shape.padded else next(live)
            drafts = max(len(shape.parents) - 1, 0)
            request = replace(mine.request) if mine else StateRequest(0)
            request.chunk, request.parents, request.unused = shape.chunk, shape.parents, shape.unused
            pool = self.free_blocks if self.mode == "slots" else slots
            request.drafts = [pool.pop() for _ in range(drafts)] if mine else []
            requests.append(request)
            tracked.append(mine)
        return requests, tracked

    def _free_slots(self) -> list[int]:
        held = {slot for mine in self.live for slot in mine.request.pending}
        free = [slot for slot in range(1, self.num_slots) if slot not in held]
        return self.rng.sample(free, len(free))

    def _used_rows(self, requests: list[StateRequest]) -> set[int]:
        starts = first_rows(requests)
        return {first + i for first, q in zip(starts, requests, strict=False) if q.block for i in range(q.num_used)}

    def _follow(self, mine: Tracked, request: StateRequest, inputs: Inputs, out: Tensor) -> None:
        """Compare the outputs of a request and what is stored, then accept a path."""
        states: list[Tensor] = []
        wanted = []
        for row, parent in enumerate(request.row_parents):
            state = mine.state if parent < 0 else states[parent]
            found, state = self.op.oracle(state, tuple(x[row].double() for x in inputs))
            wanted.append(found)
            states.append(state)
        if wanted:
            self.worst_output = max(self.worst_output, error(out[: len(wanted)], torch.stack(wanted)))
        plan_states = states[request.chunk :]
        self._compare_state(request.block, plan_states[0] if plan_states else states[-1] if states else mine.state)
        if self.mode == "slots":
            for block, state in zip(request.drafts, plan_states[1:], strict=True):
                self._compare_state(block, state)
        self._check_snapshots([request], [mine])
        mine.request = StateRequest(request.block)
        mine.path_states = []
        path = path_to(request.parents, self.rng.randrange(len(request.parents))) if request.parents else []
        last = request.chunk + path[-1] if path else request.chunk - 1
        mine.state = states[last] if states else mine.state
        if self.mode == "slots":
            kept = request.drafts[path[-1] - 1] if len(path) > 1 else request.block
            self.free_blocks += [block for block in (request.block, *request.drafts) if block != kept]
            mine.request.block = kept
        elif len(path) > 1:
            mine.request.pending = [request.drafts[column - 1] for column in path[1:]]
            mine.path_states = [states[request.chunk + column] for column in path[1:]]
            if self.rng.random() < 0.6:
                block = self.free_blocks.pop(0)
                mine.request.snapshot = (self.rng.randint(1, len(path) - 1), block)

    def _check_snapshots(self, requests: list[StateRequest], tracked: list[Tracked]) -> None:
        for request, mine in zip(requests, tracked, strict=True):
            after, block = request.snapshot
            if after:
                found = self.op.stored(self.cache)[block]
                self.worst_snapshot = max(self.worst_snapshot, error(found, mine.path_states[after - 1]))
                self.free_blocks.append(block)

    def _compare_state(self, block: int, wanted: Tensor) -> None:
        self.worst_state = max(self.worst_state, error(self.op.stored(self.cache)[block], wanted))

    def _check_untouched(self, before: Tensor, requests: list[StateRequest]) -> None:
        """Blocks that the step does not name keep their bits, poison included."""
        named = {0}
        for request in requests:
            named |= {request.block, request.snapshot[1]}
            named |= set(request.drafts) if self.mode == "slots" else set()
        others = [block for block in range(self.num_blocks) if block not in named]
        after = self.op.stored(self.cache)
        assert torch.equal(after[others].nan_to_num(nan=7e7), before[others].nan_to_num(nan=7e7))

    @property
    def worst(self) -> float:
        return max(self.worst_output, self.worst_state, self.worst_snapshot)
