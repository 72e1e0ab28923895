"""`FusedDecoder`: a standard decoder stack in few large operations, on the Hugging Face module's own weights.

Projections of one input are merged (Q, K and V; gate and up), and the module's weights become views of the merged one,
so nothing is stored twice. Rotary runs on queries and keys at once. The equations are those of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from specround.models.attention import AttentionLayer
from specround.models.linear import DenseLinear, Projection, Quantization, make_projection

FUSED_MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders of the standard form: norm, attention, add; norm, gated SiLU, add."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _FusedLayer:
    """One layer's weights and projections."""

    attention: AttentionLayer
    input_norm: Tensor
    post_norm: Tensor
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    head_norm: Tensor | None
    scale: float


class FusedDecoder:
    """Runs packed rows through the layers of a base model.

    Args:
        base: The Hugging Face base model (without the head); its projections become views of merged weights.
        config: Its configuration.
        layers: The engine's attention layers, in order.
        quantization: Pack projections, or None.
    """

    def __init__(
        self,
        base: Any,
        config: Any,
        layers: Sequence[AttentionLayer],
        quantization: Quantization | None = None,
    ) -> None:
        first = base.layers[0].self_attn
        self._embed, self._rotary, self._norm = base.embed_tokens.weight, base.rotary_emb, base.norm.weight
        self._eps = torch.tensor([float(config.rms_norm_eps)], dtype=torch.float64, device=self._norm.device)
        # Levels of activations amplify a last bit that depends on the number of rows; scores in float64 have none.
        self._score_dtype = torch.float64 if quantization == "w8a8" else self._norm.dtype
        self._head_dim = int(first.head_dim)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._num_heads = int(config.num_attention_heads)
        pairs = zip(base.layers, layers, strict=True)
        self._layers = [_fuse_layer(module, layer, self, quantization) for module, layer in pairs]

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads."""
        return self._num_heads, self._num_kv_heads

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[N, H]` after the final norm, of `[N]` ids at `[N]` positions."""
        hidden = functional.embedding(input_ids, self._embed)
        cos, sin = self._rotary(hidden[None], position_ids=positions[None])
        half = self._head_dim // 2
        cos = cos[0, :, None]
        sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
        for layer in self._layers:
            attended = self._attend(layer, self._rms_norm(hidden, layer.input_norm), cos, sin)
            hidden = hidden + layer.out(attended)
            gate_up = layer.gate_up(self._rms_norm(hidden, layer.post_norm))
            gate, up = gate_up.chunk(2, -1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return self._rms_norm(hidden, self._norm)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension, a third faster on a CPU than torch's, which is a composite too.

        The norm is summed in float64, so that its rounding does not depend on how many rows are summed at once.
        """
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        inverse = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_().float()
        return (x * inverse).to(x.dtype) * weight

    def _attend(self, layer: _FusedLayer, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated_heads = self._num_heads + self._num_kv_heads
        heads = layer.qkv(normed).view(normed.shape[0], rotated_heads + self._num_kv_heads, self._head_dim)
        turning = heads[:, :rotated_heads]
        if layer.head_norm is not None:
            turning = self._rms_norm(turning, layer.head_norm)
        turned = torch.addcmul(turning * cos, turning.roll(self._head_dim // 2, -1), sin)
        query, key = turned[:, : self._num_heads], turned[:, self._num_heads :]
        out = layer.attention.attend(query.to(self._score_dtype), key, heads[:, rotated_heads:], layer.scale, None)
        return out.flatten(1).to(normed.dtype)


def _fuse_layer(
    module: Any, attention: AttentionLayer, decoder: FusedDecoder, quantization: Quantization | None
) -> _FusedLayer:
    attn, mlp = module.self_attn, module.mlp
    head_norm = None
    if hasattr(attn, "q_norm"):
        num_heads, num_kv_heads = decoder.heads
        weights = [attn.q_norm.weight.expand(num_heads, -1), attn.k_norm.weight.expand(num_kv_heads, -1)]
        head_norm = torch.cat(weights)
    return _FusedLayer(
        attention=attention,
        input_norm=module.input_layernorm.weight,
        post_norm=module.post_attention_layernorm.weight,
        qkv=_merge([attn.q_proj, attn.k_proj, attn.v_proj], quantization),
        out=_merge([attn.o_proj], quantization),
        gate_up=_merge([mlp.gate_proj, mlp.up_proj], quantization),
        down=_merge([mlp.down_proj], quantization),
        head_norm=head_norm,
        scale=float(attn.scaling),
    )


def _merge(parts: Sequence[nn.Linear], quantization: Quantization | None) -> Projection:
    """One projection of several; their own weights become views of its weight, or go when it is packed."""
    weight = parts[0].weight.data if len(parts) == 1 else torch.cat([part.weight.data for part in parts])
    bias = None
    if parts[0].bias is not None:
        bias = torch.cat([part.bias.data for part in parts])
    projection = make_projection(weight, bias, quantization)
    keeps = isinstance(projection, DenseLinear)
    kept = weight if keeps else weight.new_zeros(0, weight.shape[1])
    for part in parts:
        rows = part.weight.shape[0] if keeps else 0
        part.weight.data, kept = kept[:rows], kept[rows:]
    return projection
