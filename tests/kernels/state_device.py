"""Recurrent ops on a GPU: the same checks of bits, and steps captured into a graph."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from state_cases import StateRequest, build_rows
from state_checks import check_bits
from state_rounds import Inputs, OpCase, error, poison
from torch import Tensor

from specround.kernels.state_rows import StateMode, StateRows


def moved(value: Any, device: torch.device) -> Any:
    """A dataclass, tuple or tensor with every tensor on a device; caches of derived tensors start empty."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if is_dataclass(value):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return {} if isinstance(value, dict) else value


class OnDevice:
    """An op whose caches, inputs and rows are moved to a device."""

    def __init__(self, op: OpCase, device: torch.device) -> None:
        self.op, self.device = op, device
        self.draw, self.draw_state = op.draw, op.draw_state
        self.stored, self.buffers, self.oracle = op.stored, op.buffers, op.oracle

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype) -> Any:
        return moved(self.op.cache(num_blocks, num_row_slots, dtype), self.device)

    def call(self, inputs: Inputs, cache: Any, rows: StateRows) -> Tensor:
        return self.op.call(moved(inputs, self.device), cache, moved(rows, self.device))

    def fold(self, cache: Any, rows: StateRows) -> None:
        self.op.fold(cache, moved(rows, self.device))


def check_on_gpu(op: OpCase, mode: StateMode) -> None:
    """Rows have the bits of tokens decoded alone on the GPU, and a captured step those of the step itself."""
    device = torch.device("cuda")
    for batch in (1, 3, 17):
        check_bits(OnDevice(op, device), mode, batch, siblings=True, seed=batch)
    generator = torch.Generator().manual_seed(0)
    trees = [[-1, 0, 0, 1, 2], [-1, 0], [-1]]
    requests = [StateRequest(1, parents=trees[0], drafts=[4, 5, 6, 7], unused=1), StateRequest(2, parents=trees[1])]
    requests += [StateRequest(0, parents=trees[2]), StateRequest(3)]
    requests[1].drafts = [8]
    if mode == "replay":
        requests[0].pending, requests[0].snapshot, requests[3].pending = [9, 10], (1, 9), [11]
    rows = moved(build_rows(requests, mode), device)
    inputs = moved(op.draw(rows.num_rows, generator), device)
    cache = moved(poison(op, op.cache(12, 12 if mode == "replay" else 0, torch.float32)), device)
    for block in (1, 2, 3):
        op.stored(cache)[block] = op.draw_state(generator)
    for buffer in op.buffers(cache):
        buffer[9:12] = 0.1 * torch.rand(buffer[9:12].shape, generator=generator) - 0.1
    kept = [tensor.clone() for tensor in (op.stored(cache), *op.buffers(cache))]

    def restore() -> None:
        for tensor, before in zip((op.stored(cache), *op.buffers(cache)), kept, strict=True):
            tensor.copy_(before)

    def step() -> Tensor:
        return op.call(inputs, cache, replace(rows, _taps={}))

    wanted = step().clone()
    wanted_states = op.stored(cache)[1:].clone()
    restore()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        restore()
        graph.replay()
        used = [0, 1, 2, 3, 4, 6, 7]
        assert torch.equal(out[used], wanted[used])
        assert torch.equal(op.stored(cache)[1:].nan_to_num(nan=7e7), wanted_states.nan_to_num(nan=7e7))


def check_chunks_on_gpu(op: OpCase) -> None:
    """A chunk has the same outputs and leaves the same state as on the CPU, up to float32 rounding."""
    generator = torch.Generator().manual_seed(0)
    inputs, state = op.draw(101, generator), op.draw_state(generator)
    rows = build_rows([StateRequest(1, chunk=100, parents=[-1])], "slots")
    found = []
    for case in (op, OnDevice(op, torch.device("cuda"))):
        cache = case.cache(2, 0, torch.float32)
        op.stored(cache)[1] = state
        found.append((case.call(inputs, cache, rows).cpu(), op.stored(cache)[1].cpu()))
    for wanted, got in zip(*found, strict=True):
        assert error(got, wanted.double()) <= 1e-5
