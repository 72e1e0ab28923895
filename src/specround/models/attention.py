"""The attention hook: every attention layer of a Hugging Face module attends through a kernel over paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specround.kernels.kv_cache.naive import write_kv

if TYPE_CHECKING:
    from specround.kernels.reference import AttentionKernel
    from specround.kernels.tree_attention.rows import AttentionRows

HOOK_NAME = "specround"
"""Name in transformers' attention interface. No mask function has it, so modules pass no mask of their own."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one layer stores per token: `num_kv_heads` keys of `key_dim` and values of `value_dim` elements."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(kw_only=True)
class ForwardContext:
    """What a model's attention layers share during one forward.

    Attributes:
        rows: What each row sees.
        slots: `[N]` int64, flat slot of each row, 0 = padding.
    """

    rows: AttentionRows | None = None
    slots: Tensor | None = None


class AttentionLayer:
    """One layer's cache and kernel; the module's attention calls `attend`.

    Args:
        index: Place among the model's attention layers, from 0.
        context: Shared with the other layers of the model.
    """

    def __init__(self, index: int, context: ForwardContext) -> None:
        self.index, self.context = index, context
        self.shape: KVShape | None = None
        self.window: int | None = None
        self.has_sinks = False
        self.softcap: float | None = None
        self._kernel: AttentionKernel | None = None
        self._key_cache: Tensor | None = None
        self._value_cache: Tensor | None = None

    def bind(self, kernel: AttentionKernel, key_cache: Tensor, value_cache: Tensor) -> None:
        """Set the kernel and the caches `[S, Hkv, D]` and `[S, Hkv, Dv]`."""
        self._kernel, self._key_cache, self._value_cache = kernel, key_cache, value_cache

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, features: dict[str, Any]) -> Tensor:
        """Write keys and values, then attend; before `bind`, record what the layer uses and return zeros.

        Args:
            query: `[N, H, D]`.
            key: `[N, Hkv, D]`.
            value: `[N, Hkv, Dv]`.
            scale: Multiplies the scores.
            features: `window`, `sinks` and `softcap`, each None where the layer has none.

        Returns:
            `[N, H, Dv]`.
        """
        if self._kernel is None or self._key_cache is None or self._value_cache is None:
            self.shape = KVShape(num_kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2])
            self.window, self.softcap = features["window"], features["softcap"]
            self.has_sinks = features["sinks"] is not None
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        rows, slots = self.context.rows, self.context.slots
        assert rows is not None
        assert slots is not None
        write_kv(self._key_cache, self._value_cache, key, value, slots)
        return self._kernel(query, self._key_cache, self._value_cache, rows, scale=scale, **features)


def _attention_hook(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: `[1, H, T, D]` in, `[1, T, H, Dv]` out."""
    layer = module.specround_layer
    assert isinstance(layer, AttentionLayer)
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    features = {"window": sliding_window, "sinks": s_aux, "softcap": softcap}
    return layer.attend(packed[0], packed[1], packed[2], scale, features)[None], None


AttentionInterface.register(HOOK_NAME, _attention_hook)
