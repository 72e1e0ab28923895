"""Selective state spaces over chunks: Mamba2 in matrix products, Mamba1 by a scan on two levels."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.kernels.state_walk import Inputs, cut_spans, decay_between, join_spans, piece_length


def prefill(states: Tensor, writes: Inputs, reads: Inputs) -> tuple[Tensor, Tensor]:
    """Mamba2: T steps in a row. A token with zero inputs leaves the state as it is.

    Args:
        states: `[G, H, P, Ns]`, before the chunk.
        writes: dt * x `[G, T, H, P]`, dt * a `[G, T, H]`, b `[G, T, groups, Ns]`.
        reads: c `[G, T, groups, Ns]`.

    Returns:
        `[G, T, H, P]` outputs, and the states after the chunk.
    """
    tokens = writes[0].shape[1]
    outputs = []
    for span in cut_spans((*reads, *writes), piece_length(tokens)):
        out, states = _scan_span(states, *span)
        outputs.append(out)
    return join_spans(outputs, tokens), states


def _scan_span(states: Tensor, c: Tensor, x: Tensor, log_decay: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[n, G, L, H, P]` and the state after n pieces; inputs are `[n, G, L, heads or groups, ...]`."""
    c, x, log_decay, b = (tensor.transpose(2, 3) for tensor in (c, x, log_decay, b))
    pieces, requests, heads, length, head_dim = x.shape
    groups, state_dim = b.shape[2], b.shape[4]
    total = log_decay.cumsum(-1, dtype=torch.float64)[..., None]  # [n, G, H, L, 1]
    decay = total.to(x.dtype).exp()  # from the start of the piece
    remaining = (total[..., -1:, :] - total).to(x.dtype).exp_()  # to its end
    scores = (c @ b.mT).repeat_interleave(heads // groups, 2) * decay_between(total, x.dtype)
    out = scores @ x
    # [n, G, groups, H / groups * P, L]: all heads of a group share one product with b, and with c
    kept = (x * remaining).mT.reshape(pieces, requests, groups, -1, length)
    state = states
    for i in range(pieces):
        carried = c[i] @ state.reshape(requests, groups, -1, state_dim).mT  # [G, groups, L, H / groups * P]
        carried = carried.view(requests, groups, length, -1, head_dim).transpose(2, 3)
        carried = carried.reshape(requests, heads, length, head_dim)
        out[i] += carried * decay[i]
        state = state * decay[i, :, :, -1:] + (kept[i] @ b[i]).view_as(states)
    return out.transpose(2, 3), state


def prefill_scan(a: Tensor, states: Tensor, writes: Inputs, reads: Inputs) -> tuple[Tensor, Tensor]:
    """Mamba1: T steps in a row. A token with zero inputs leaves the state as it is.

    Args:
        a: `[E, Ns]`.
        states: `[G, E, Ns]`, before the chunk.
        writes: dt * x `[G, T, E]`, dt `[G, T, E]`, b `[G, T, Ns]`.
        reads: c `[G, T, Ns]`.

    Returns:
        `[G, T, E]` outputs, and the states after the chunk.
    """
    tokens = writes[0].shape[1]
    outputs = []
    for span in cut_spans((*reads, *writes), piece_length(tokens), span=1):
        c, x, dt, b = (tensor[0] for tensor in span)
        kept = x[..., None] * b[:, :, None]  # [G, L, E, Ns]
        after = _scan_piece(states, (dt[..., None] * a).exp_(), kept)
        states = after[:, -1]
        outputs.append((after @ c[..., None])[None, ..., 0])
    return join_spans(outputs, tokens), states


def _scan_piece(state: Tensor, decay: Tensor, kept: Tensor) -> Tensor:
    """`S_t = decay_t * S_t-1 + kept_t` for the L tokens of a piece: a scan in blocks, then a scan over blocks.

    Args:
        state: `[G, E, Ns]` before the piece.
        decay: `[G, L, E, Ns]`, overwritten.
        kept: `[G, L, E, Ns]`, overwritten.

    Returns:
        `[G, L, E, Ns]`, the state after each token.
    """
    length = kept.shape[1]
    block = 1 << (length.bit_length() // 2)  # near the square root of the length, which is a power of two
    decays, sums = (x.view(-1, length // block, block, *x.shape[2:]) for x in (decay, kept))
    for place in range(1, block):
        sums[:, :, place] += decays[:, :, place] * sums[:, :, place - 1]
        decays[:, :, place] *= decays[:, :, place - 1]
    for i in range(length // block):
        sums[:, i] += decays[:, i] * state[:, None]
        state = sums[:, i, -1]
    return sums.flatten(1, 2)
