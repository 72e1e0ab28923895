"""The gated delta rule as the shared round tests see it, and its recurrence in float64, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from state_rounds import Inputs
from torch import Tensor
from torch.nn import functional

from specround.kernels.gated_delta_rule.naive import DeltaRuleCache, fold_delta_rule, gated_delta_rule
from specround.kernels.state_rows import StateRows


@dataclass(frozen=True)
class DeltaRule:
    """A layer; `channel_decay` is KDA. `reset` is the share of rows whose decay is e^-90.

    Log decays are uniform in [-decay, 0], or with decay 0 as trained models begin: -A dt with A uniform in [0, 16] and
    dt log-uniform in [0.001, 0.1].
    """

    channel_decay: bool = False
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 7
    value_dim: int = 5
    reset: float = 0.0
    decay: float = 0.3

    def cache(self, num_blocks: int, num_row_slots: int, dtype: torch.dtype = torch.float32) -> DeltaRuleCache:
        return DeltaRuleCache.zeros(
            num_blocks,
            num_row_slots,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            channel_decay=self.channel_decay,
            dtype=dtype,
        )

    def stored(self, cache: DeltaRuleCache) -> Tensor:
        return cache.states

    def buffers(self, cache: DeltaRuleCache) -> Inputs:
        return cache.row_buffers

    def draw_state(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.value_heads, self.key_dim, self.value_dim, generator=generator)

    def draw(self, rows: int, generator: torch.Generator) -> Inputs:
        query, key = (
            functional.normalize(torch.randn(rows, self.key_heads, self.key_dim, generator=generator), dim=-1)
            for _ in range(2)
        )
        value = torch.randn(rows, self.value_heads, self.value_dim, generator=generator)
        shape = (rows, self.value_heads, *([self.key_dim] if self.channel_decay else []))
        log_decay = -self.decay * torch.rand(shape, generator=generator)
        if self.decay == 0:
            rate = torch.linspace(0, 16, self.value_heads).view(-1, *[1] * (len(shape) - 2))
            log_decay = -rate * 10 ** (-3 + 2 * torch.rand(shape, generator=generator))
        log_decay[torch.rand(shape, generator=generator) < self.reset] = -90.0
        beta = torch.rand(rows, self.value_heads, generator=generator)
        return query * self.key_dim**-0.5, key, value, log_decay, beta

    def call(self, inputs: Inputs, cache: DeltaRuleCache, rows: StateRows) -> Tensor:
        return gated_delta_rule(*inputs, cache, rows)

    def fold(self, cache: DeltaRuleCache, rows: StateRows) -> None:
        fold_delta_rule(cache, rows)

    def oracle(self, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        query, key, value, log_decay, beta = inputs
        state = state.clone()
        out = []
        for head in range(self.value_heads):
            reads = head * self.key_heads // self.value_heads
            decayed = log_decay[head].exp().reshape(-1, 1) * state[head]
            update = beta[head] * (value[head] - key[reads] @ decayed)
            state[head] = decayed + torch.outer(key[reads], update)
            out.append(query[reads] @ state[head])
        return torch.stack(out), state
