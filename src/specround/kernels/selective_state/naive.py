"""Selective state spaces over trees in plain torch: one step function for decoding, verification and folds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specround.contract import CapabilityError
from specround.kernels import state_walk
from specround.kernels.selective_state.chunked import prefill, prefill_scan
from specround.kernels.state_rows import StateRows
from specround.kernels.state_walk import Inputs, Recurrence, sum_pairwise


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectiveStateCache:
    """States of a Mamba2 layer with H heads of P x Ns, and what it keeps of draft rows in mode "replay".

    Block 0 is the null block and slot 0 the null slot; S = 0 in mode "slots". The dtype of the states is the one
    computed in.

    Attributes:
        states: `[B, H, P, Ns]`.
        row_x: `[S, H, P]`, dt * x.
        row_log_decay: `[S, H]`, dt * a.
        row_b: `[S, G, Ns]`.
    """

    states: Tensor
    row_x: Tensor
    row_log_decay: Tensor
    row_b: Tensor

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        num_row_slots: int,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> SelectiveStateCache:
        """A cache of zeros.

        Args:
            num_blocks: B, the null block included.
            num_row_slots: S, the null slot included; 0 in mode "slots".
            heads: H, a multiple of G.
            head_dim: P.
            groups: G, heads with the same b and c.
            state_dim: Ns.
            dtype: Of the states and row buffers, whatever the model's; float32, or float64 for comparison.
            device: Where.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            states=zeros(num_blocks, heads, head_dim, state_dim),
            row_x=zeros(num_row_slots, heads, head_dim),
            row_log_decay=zeros(num_row_slots, heads),
            row_b=zeros(num_row_slots, groups, state_dim),
        )

    @property
    def row_buffers(self) -> Inputs:
        """Row buffers in the order of the step's inputs."""
        return (self.row_x, self.row_log_decay, self.row_b)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanCache:
    """States of a Mamba1 layer with E channels; block 0 is the null block.

    Attributes:
        states: `[B, E, Ns]`; their dtype is the one computed in.
    """

    states: Tensor

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        *,
        channels: int,
        state_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> ScanCache:
        """A cache of zeros with B blocks, the null block included, of E channels and Ns state values."""
        return cls(states=torch.zeros(num_blocks, channels, state_dim, dtype=dtype, device=device))


def selective_state(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    cache: SelectiveStateCache,
    rows: StateRows,
) -> Tensor:
    """Mamba2: outputs of packed rows, each from the state its path leaves; the cache is updated.

    Head h reads group `h // (H / G)`.

    Args:
        x: `[N, H, P]`.
        dt: `[N, H]`, step sizes after softplus and clamp.
        a: `[H]`, negative.
        b: `[N, G, Ns]`.
        c: `[N, G, Ns]`.
        d: `[H]` or None, weight of the input in the output.
        cache: Read and written: committed states, and of draft rows their states (mode "slots") or inputs ("replay").
        rows: The rows of this forward.

    Returns:
        `[N, H, P]` in the dtype of the states; unused rows hold anything.
    """
    states = cache.states
    x, dt, a, b, c = (tensor.to(states.dtype) for tensor in (x, dt, a, b, c))
    writes = (x * dt[..., None], dt * a, b)
    out = state_walk.walk(_MAMBA2, states, cache.row_buffers, rows, writes, (c,), tuple(x.shape[1:]))
    return out if d is None else out.add_(x * d.to(x.dtype)[:, None])


def fold_selective_state(cache: SelectiveStateCache, rows: StateRows) -> None:
    """Fold the pending path into the committed states and do nothing else: a flush, without rows of a step.

    Args:
        cache: Its states are written in place.
        rows: Names the blocks and the pending path; its other fields are not read.
    """
    state_walk.fold_pending(_MAMBA2, cache.states, cache.row_buffers, rows)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    cache: ScanCache,
    rows: StateRows,
) -> Tensor:
    """Mamba1, for plain decoding: chunks and roots. No draft row's state or input is kept.

    Args:
        x: `[N, E]`.
        dt: `[N, E]`, step sizes after softplus.
        a: `[E, Ns]`, negative.
        b: `[N, Ns]`.
        c: `[N, Ns]`.
        d: `[E]`, weight of the input in the output.
        cache: Its committed states are read and written.
        rows: The rows of this forward.

    Returns:
        `[N, E]` in the dtype of the states; unused rows hold anything.

    Raises:
        CapabilityError: The rows have room for a pending path, which only drafts leave behind.
    """
    if rows.pending is not None and rows.pending.slots.shape[1] > 0:
        places = rows.pending.slots.shape[1]
        raise CapabilityError(f"selective_scan keeps no drafts: pending.slots has {places} places, must have 0")
    dtype = cache.states.dtype
    x, dt, a, b, c, d = (tensor.to(dtype) for tensor in (x, dt, a, b, c, d))
    recurrence = Recurrence(advance=partial(_advance_scan, a), read=_read, prefill=partial(prefill_scan, a))
    writes = (x * dt, dt, b)
    out = state_walk.walk(recurrence, cache.states, (), rows, writes, (c,), tuple(x.shape[1:]))
    return out.add_(x * d)


def _advance(states: Tensor, writes: Inputs) -> None:
    """`S <- exp(dt a) S + (dt x) b^T`, for M states `[M, H, P, Ns]` in place."""
    x, log_decay, b = writes
    states.mul_(log_decay.exp()[..., None, None])
    b = b.repeat_interleave(states.shape[1] // b.shape[1], 1)
    states.add_(x[..., None] * b[:, :, None])


def _advance_scan(a: Tensor, states: Tensor, writes: Inputs) -> None:
    """`S <- exp(dt a) * S + (dt x) b^T`, for M states `[M, E, Ns]` in place; every entry has its own decay."""
    x, dt, b = writes
    states.mul_((dt[..., None] * a).exp_())
    states.add_(x[..., None] * b[:, None])


def _read(states: Tensor, reads: Inputs) -> Tensor:
    """`S c`: `[M, H, P]`, or `[M, E]` from `[M, E, Ns]`."""
    (c,) = reads
    if c.dim() == 3:
        c = c.repeat_interleave(states.shape[1] // c.shape[1], 1)
    return sum_pairwise(states * c.unsqueeze(-2), -1)


_MAMBA2 = Recurrence(advance=_advance, read=_read, prefill=prefill)
