"""Tree attention in plain torch: gather each request's keys once, then one masked attention call per row group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specround.kernels.tree_attention.rows import AttentionRows, RowGroup


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: AttentionRows,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of packed rows over paged keys and values.

    Args:
        query: `[N, H, D]`; its dtype is the one computed in, whatever the caches'.
        key_cache: `[S, Hkv, D]`, S slots; slot 0 is in the null block and holds zeros. H is a multiple of Hkv.
        value_cache: `[S, Hkv, Dv]`.
        rows: Which keys each row sees.
        scale: Multiplies the scores.
        window: Sliding window in logical positions, or None.
        sinks: `[H]` logits of a virtual key without value, or None.
        softcap: `cap * tanh(score / cap)` on the scaled scores, or None.

    Returns:
        `[N, H, Dv]` in the query's dtype. Rows that see nothing get an arbitrary finite value.
    """
    if len(rows.groups) == 1 and rows.groups[0].first_row == 0:
        return _attend_group(query, key_cache, value_cache, rows.groups[0], scale, window, sinks, softcap)
    heads, value_dim = query.shape[1], value_cache.shape[2]
    out = query.new_empty(rows.num_rows + 1, heads, value_dim)
    for group in rows.groups:
        result = _attend_group(query, key_cache, value_cache, group, scale, window, sinks, softcap)
        if group.first_row >= 0:
            out[group.first_row : group.first_row + group.rows.numel()] = result
        else:
            out.index_copy_(0, group.rows.flatten(), result)
    return out[: rows.num_rows]


def _attend_group(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: RowGroup,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    size, rows = group.rows.shape
    heads, key_heads = query.shape[1], key_cache.shape[1]
    repeats = heads // key_heads
    keys, values = (
        cache.index_select(0, group.key_slots).to(query.dtype).view(size, -1, *cache.shape[1:]).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    if group.first_row >= 0:
        packed = query[group.first_row : group.first_row + size * rows]
    else:
        packed = query[group.rows.flatten().clamp(max=query.shape[0] - 1)]
    packed = packed.view(size, rows, key_heads, repeats, -1).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(size, key_heads, repeats * rows, -1)
    bias = group.bias(window, repeats, query.dtype)
    if sinks is None and softcap is None:
        out = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=scale)
    else:
        out = _explicit(packed, keys, values, bias, scale, sinks, softcap)
    return out.view(size, key_heads, repeats, rows, -1).permute(0, 3, 1, 2, 4).reshape(size * rows, heads, -1)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ keys.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias.to(wide)
    if sinks is not None:
        key_heads, repeated = query.shape[1], query.shape[2]
        per_head = sinks.to(wide).view(key_heads, -1).repeat_interleave(repeated // (sinks.numel() // key_heads), 1)
        sink = per_head.view(1, key_heads, repeated, 1).expand(query.shape[0], -1, -1, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(values.dtype) @ values
