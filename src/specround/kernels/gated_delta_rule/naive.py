"""The gated delta rule over trees in plain torch: one step function for decoding, verification and folds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specround.kernels import state_walk
from specround.kernels.gated_delta_rule.chunked import prefill
from specround.kernels.state_rows import StateRows
from specround.kernels.state_walk import Inputs, Recurrence, sum_pairwise


@dataclass(frozen=True, eq=False, kw_only=True)
class DeltaRuleCache:
    """States of a layer with Hv value heads of Dk x Dv, and what it keeps of draft rows in mode "replay".

    Block 0 is the null block and slot 0 the null slot; S = 0 in mode "slots". The dtype of the states is the one
    computed in.

    Attributes:
        states: `[B, Hv, Dk, Dv]`.
        row_key: `[S, Hk, Dk]`.
        row_value: `[S, Hv, Dv]`.
        row_log_decay: `[S, Hv]` (Gated DeltaNet) or `[S, Hv, Dk]` (KDA).
        row_beta: `[S, Hv]`.
    """

    states: Tensor
    row_key: Tensor
    row_value: Tensor
    row_log_decay: Tensor
    row_beta: Tensor

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        num_row_slots: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        channel_decay: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> DeltaRuleCache:
        """A cache of zeros.

        Args:
            num_blocks: B, the null block included.
            num_row_slots: S, the null slot included; 0 in mode "slots".
            key_heads: Hk.
            value_heads: Hv, a multiple of Hk.
            key_dim: Dk.
            value_dim: Dv.
            channel_decay: One decay per key channel (KDA) instead of one per head.
            dtype: Of the states and row buffers, whatever the model's; float32, or float64 for comparison.
            device: Where.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            states=zeros(num_blocks, value_heads, key_dim, value_dim),
            row_key=zeros(num_row_slots, key_heads, key_dim),
            row_value=zeros(num_row_slots, value_heads, value_dim),
            row_log_decay=zeros(num_row_slots, value_heads, *([key_dim] if channel_decay else [])),
            row_beta=zeros(num_row_slots, value_heads),
        )

    @property
    def row_buffers(self) -> Inputs:
        """Row buffers in the order of the step's inputs."""
        return (self.row_key, self.row_value, self.row_log_decay, self.row_beta)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cache: DeltaRuleCache,
    rows: StateRows,
) -> Tensor:
    """Outputs of packed rows, each from the state its path leaves; the cache is updated.

    Value head h reads key head `h // (Hv / Hk)`.

    Args:
        query: `[N, Hk, Dk]`, L2-normalised and scaled.
        key: `[N, Hk, Dk]`, L2-normalised.
        value: `[N, Hv, Dv]`.
        log_decay: `[N, Hv]` (Gated DeltaNet) or `[N, Hv, Dk]` (KDA), finite and <= 0.
        beta: `[N, Hv]`, write strength.
        cache: Read and written: committed states, and of draft rows their states (mode "slots") or inputs ("replay").
        rows: The rows of this forward.

    Returns:
        `[N, Hv, Dv]` in the dtype of the states; unused rows hold anything.
    """
    dtype = cache.states.dtype
    writes = tuple(x.to(dtype) for x in (key, value, log_decay, beta))
    return state_walk.walk(
        _RECURRENCE, cache.states, cache.row_buffers, rows, writes, (query.to(dtype),), tuple(value.shape[1:])
    )


def fold_delta_rule(cache: DeltaRuleCache, rows: StateRows) -> None:
    """Fold the pending path into the committed states and do nothing else: a flush, without rows of a step.

    Args:
        cache: Its states are written in place.
        rows: Names the blocks and the pending path; its other fields are not read.
    """
    state_walk.fold_pending(_RECURRENCE, cache.states, cache.row_buffers, rows)


def _advance(states: Tensor, writes: Inputs) -> None:
    """`S <- a S + k u^T` with `u = beta (v - a S^T k)`, for M states `[M, Hv, Dk, Dv]` in place."""
    key, value, log_decay, beta = writes
    key = key.repeat_interleave(states.shape[1] // key.shape[1], 1)[..., None]  # [M, Hv, Dk, 1]
    if log_decay.dim() == 2:
        log_decay = log_decay[..., None]
    states.mul_(log_decay.exp()[..., None])
    products = states * key
    held = sum_pairwise(products, -2)  # [M, Hv, Dv], what the decayed state answers to the key
    update = (value - held) * beta[..., None]
    states.add_(torch.mul(key, update[:, :, None], out=products))


def _read(states: Tensor, reads: Inputs) -> Tensor:
    """`S^T q`: `[M, Hv, Dv]`."""
    (query,) = reads
    query = query.repeat_interleave(states.shape[1] // query.shape[1], 1)
    return sum_pairwise(states * query[..., None], -2)


_RECURRENCE = Recurrence(advance=_advance, read=_read, prefill=prefill)
