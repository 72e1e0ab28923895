"""The causal convolution as the shared round tests see it, and its sum over a window, tap by tap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from state_rounds import Inputs
from torch import Tensor

from specround.kernels.causal_conv.naive import ConvCache, causal_conv, fold_window
from specround.kernels.state_rows import StateRows


@dataclass(frozen=True)
class Conv:
    """A layer; its state is its window."""

    channels: int = 5
    width: int = 4
    with_bias: bool = True

    def weight(self, device: torch.device | None = None) -> Tensor:
        return torch.arange(1.0, self.channels * self.width + 1, device=device).sin().view(self.channels, self.width)

    def bias(self, device: torch.device | None = None) -> Tensor | None:
        return torch.linspace(-1.0, 1.0, self.channels, device=device) if self.with_bias else None

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype = torch.float32) -> ConvCache:
        return ConvCache.zeros(num_blocks, num_row_slots, channels=self.channels, width=self.width, dtype=dtype)

    def stored(self, cache: ConvCache) -> Tensor:
        return cache.windows

    def buffers(self, cache: ConvCache) -> Inputs:
        return (cache.row_inputs,)

    def draw_state(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.width - 1, self.channels, generator=generator)

    def draw(self, rows: int, generator: torch.Generator) -> Inputs:
        return (torch.randn(rows, self.channels, generator=generator),)

    def call(self, inputs: Inputs, cache: ConvCache, rows: StateRows) -> Tensor:
        return causal_conv(inputs[0], self.weight(inputs[0].device), self.bias(inputs[0].device), cache, rows)

    def fold(self, cache: ConvCache, rows: StateRows) -> None:
        fold_window(cache, rows)

    def oracle(self, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        taps = torch.cat([state, inputs[0][None]])
        weight, bias = self.weight().double(), self.bias()
        out = torch.zeros(self.channels, dtype=torch.float64) if bias is None else bias.double()
        for tap, entry in enumerate(taps):
            out = out + weight[:, tap] * entry
        return out, taps[1:]
