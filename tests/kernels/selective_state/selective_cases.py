"""Mamba2 and Mamba1 as the shared round tests see them, and their recurrences in float64, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from state_rounds import Inputs
from torch import Tensor

from specround.kernels.selective_state.naive import (
    ScanCache,
    SelectiveStateCache,
    fold_selective_state,
    selective_scan,
    selective_state,
)
from specround.kernels.state_rows import StateRows


@dataclass(frozen=True)
class Mamba2:
    """A layer. `reset` is the share of rows and heads whose decay is e^-90.

    With `trained`, decays are as trained models begin: a from -1 to -16, dt log-uniform in [0.001, 0.1].
    """

    heads: int = 4
    head_dim: int = 3
    groups: int = 2
    state_dim: int = 5
    skip: bool = True
    reset: float = 0.0
    trained: bool = False

    def a(self, device: torch.device | None = None) -> Tensor:
        slow, fast = (1.0, 16.0) if self.trained else (0.05, 1.0)
        return -torch.linspace(slow, fast, self.heads, device=device)

    def d(self, device: torch.device | None = None) -> Tensor | None:
        return torch.linspace(-1.0, 1.0, self.heads, device=device) if self.skip else None

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype = torch.float32) -> SelectiveStateCache:
        return SelectiveStateCache.zeros(
            num_blocks,
            num_row_slots,
            heads=self.heads,
            head_dim=self.head_dim,
            groups=self.groups,
            state_dim=self.state_dim,
            dtype=dtype,
        )

    def stored(self, cache: SelectiveStateCache) -> Tensor:
        return cache.states

    def buffers(self, cache: SelectiveStateCache) -> Inputs:
        return cache.row_buffers

    def draw_state(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.heads, self.head_dim, self.state_dim, generator=generator)

    def draw(self, rows: int, generator: torch.Generator) -> Inputs:
        x = torch.randn(rows, self.heads, self.head_dim, generator=generator)
        dt = 0.01 + torch.rand(rows, self.heads, generator=generator)
        if self.trained:
            dt = 10 ** (-3 + 2 * torch.rand(rows, self.heads, generator=generator))
        dt = torch.where(torch.rand(rows, self.heads, generator=generator) < self.reset, -90 / self.a(), dt)
        b, c = (torch.randn(rows, self.groups, self.state_dim, generator=generator) for _ in range(2))
        return x, dt, b, c

    def call(self, inputs: Inputs, cache: SelectiveStateCache, rows: StateRows) -> Tensor:
        x, dt, b, c = inputs
        return selective_state(x, dt, self.a(x.device), b, c, self.d(x.device), cache, rows)

    def fold(self, cache: SelectiveStateCache, rows: StateRows) -> None:
        fold_selective_state(cache, rows)

    def oracle(self, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, dt, b, c = inputs
        a, d, state = self.a().double(), self.d(), state.clone()
        out = torch.zeros_like(x)
        for head in range(self.heads):
            group = head * self.groups // self.heads
            decay = (dt[head] * a[head]).exp()
            state[head] = decay * state[head] + torch.outer(dt[head] * x[head], b[group])
            out[head] = state[head] @ c[group]
            if d is not None:
                out[head] += d[head].double() * x[head]
        return out, state


@dataclass(frozen=True)
class Mamba1:
    """A layer of plain decoding; `a` spans slow and fast channels."""

    channels: int = 6
    state_dim: int = 5

    def a(self, device: torch.device | None = None) -> Tensor:
        rates = torch.linspace(0.02, 9.0, self.channels * self.state_dim, device=device)
        return -rates.view(self.channels, self.state_dim)

    def d(self, device: torch.device | None = None) -> Tensor:
        return torch.linspace(-1.0, 1.0, self.channels, device=device)

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype = torch.float32) -> ScanCache:
        return ScanCache.zeros(num_blocks, channels=self.channels, state_dim=self.state_dim, dtype=dtype)

    def stored(self, cache: ScanCache) -> Tensor:
        return cache.states

    def buffers(self, cache: ScanCache) -> Inputs:
        return ()

    def draw_state(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.channels, self.state_dim, generator=generator)

    def draw(self, rows: int, generator: torch.Generator) -> Inputs:
        x = torch.randn(rows, self.channels, generator=generator)
        dt = 0.01 + torch.rand(rows, self.channels, generator=generator)
        b, c = (torch.randn(rows, self.state_dim, generator=generator) for _ in range(2))
        return x, dt, b, c

    def call(self, inputs: Inputs, cache: ScanCache, rows: StateRows) -> Tensor:
        x, dt, b, c = inputs
        return selective_scan(x, dt, self.a(x.device), b, c, self.d(x.device), cache, rows)

    def fold(self, cache: ScanCache, rows: StateRows) -> None:
        raise AssertionError("Mamba1 has nothing to fold")

    def oracle(self, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, dt, b, c = inputs
        a, d, state = self.a().double(), self.d().double(), state.clone()
        out = torch.zeros_like(x)
        for channel in range(self.channels):
            decay = (dt[channel] * a[channel]).exp()
            state[channel] = decay * state[channel] + dt[channel] * x[channel] * b
            out[channel] = (state[channel] * c).sum() + d[channel] * x[channel]
        return out, state
