"""The gated delta rule over chunks, in matrix products: pieces of tokens that are solved at once (the WY form)."""

from __future__ import annotations

import torch
from torch import Tensor

from specround.kernels.state_walk import Inputs, cut_spans, decay_between, join_spans, piece_length


def prefill(states: Tensor, writes: Inputs, reads: Inputs) -> tuple[Tensor, Tensor]:
    """T steps in a row. A token with zero inputs leaves the state as it is.

    Args:
        states: `[G, Hv, Dk, Dv]`, before the chunk.
        writes: key `[G, T, Hk, Dk]`, value `[G, T, Hv, Dv]`, log decay `[G, T, Hv]` or `[G, T, Hv, Dk]`, beta
            `[G, T, Hv]`.
        reads: query `[G, T, Hk, Dk]`.

    Returns:
        `[G, T, Hv, Dv]` outputs, and the states after the chunk.
    """
    tokens = writes[0].shape[1]
    outputs = []
    for span in cut_spans((*reads, *writes), piece_length(tokens)):
        out, states = _scan(states, *span)
        outputs.append(out)
    return join_spans(outputs, tokens), states


def _scan(
    states: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs `[n, G, L, Hv, Dv]` and the state after n pieces; inputs are `[n, G, L, heads, ...]`."""
    pieces, groups, length, heads, value_dim = value.shape
    query, key, value = (x.transpose(2, 3) for x in (query, key, value))
    beta = beta.transpose(2, 3)[..., None]
    if log_decay.dim() == 4:
        log_decay = log_decay[..., None]
    total = log_decay.transpose(2, 3).cumsum(-2, dtype=torch.float64)  # [n, G, Hv, L, 1 or Dk]
    by_key, by_query = _scores(query, key, total, heads)
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    decay = total.to(key.dtype).exp()  # from the start of the piece
    remaining = (total[..., -1:, :] - total).to(key.dtype).exp_()  # to its end
    right = torch.cat([value, key * decay], -1) * beta
    # The diagonal is not read, what is above it is zero.
    solved = torch.linalg.solve_triangular(by_key * beta, right, upper=False, unitriangular=True)

    def batched(x: Tensor) -> Tensor:
        return x.reshape(pieces, groups * heads, *x.shape[3:])

    fresh, erased = batched(solved[..., :value_dim]), batched(solved[..., value_dim:])
    asked, scores, kept = batched(query * decay), batched(by_query), batched(key * remaining).mT
    whole = batched(decay[..., -1:, :]).mT
    out = torch.empty_like(fresh)
    state = states.flatten(0, 1)
    for i in range(pieces):
        update = torch.baddbmm(fresh[i], erased[i], state, alpha=-1)
        out[i] = torch.baddbmm(asked[i] @ state, scores[i], update)
        state = torch.baddbmm(state * whole[i], kept[i], update)
    return out.view(pieces, groups, heads, length, value_dim).transpose(2, 3), state.view_as(states)


def _scores(query: Tensor, key: Tensor, total: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Decayed products of keys with keys and of queries with keys, `[n, G, Hv, L, L]` each, zero above the diagonal."""
    repeats = heads // key.shape[2]
    if total.shape[-1] == 1:
        decay = decay_between(total, key.dtype)
        plain = (x @ key.mT for x in (key, query))
        by_key, by_query = (x.repeat_interleave(repeats, 2) * decay for x in plain)
    else:
        both = torch.stack([key, query], 3).repeat_interleave(repeats, 2)
        by_key, by_query = _channel_scores(both, total).unbind(3)
    return by_key, by_query


def _channel_scores(rows: Tensor, total: Tensor) -> Tensor:
    """Scores with a decay per channel, `sum_d x_id k_jd exp(total_id - total_jd)` for j <= i, else 0.

    A block of tokens is cut at its middle m: for i behind and j up to m, the exponential is the product of
    `exp(total_i - total_m)` and `exp(total_m - total_j)`, neither above 1, so nothing overflows, and nothing underflows
    that is not zero. The quarter below the diagonal is one matrix product; the two on it are blocks of half the size.

    Args:
        rows: `[n, G, H, 2, L, D]`: keys, then queries. L is a power of two.
        total: `[n, G, H, L, D]` float64.

    Returns:
        `[n, G, H, 2, L, L]`.
    """
    *lead, sorts, length, width = rows.shape
    key = rows[..., 0, :, :]
    scores = rows.new_zeros(*lead, sorts, length, length)
    scores.diagonal(dim1=-2, dim2=-1).copy_((rows * key[..., None, :, :]).sum(-1))
    half = 1
    while half < length:
        blocks = length // (2 * half)
        before, behind = total.view(*lead, blocks, 2, half, width).unbind(-3)
        middle = before[..., -1:, :]
        left = (behind - middle).to(rows.dtype).exp_()
        right = (middle - before).to(rows.dtype).exp_()
        later = rows.view(*lead, sorts, blocks, 2, half, width)[..., 1, :, :] * left[..., None, :, :, :]
        earlier = key.view(*lead, blocks, 2, half, width)[..., 0, :, :] * right
        product = later @ earlier[..., None, :, :, :].mT  # [n, G, H, 2, blocks, half, half]
        on_diagonal = scores.view(*lead, sorts, blocks, 2 * half, blocks, 2 * half).diagonal(dim1=-4, dim2=-2)
        on_diagonal[..., half:, :half, :] = product.movedim(-3, -1)
        half *= 2
    return scores
