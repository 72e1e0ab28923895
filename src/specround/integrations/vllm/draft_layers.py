"""`DraftLayers`: the attention layers that a drafter declares, with KV in vLLM's pool beside the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from specround.contract import ConfigError, DraftLayer, LayerDescriptor
from specround.integrations.vllm.attention import split_cache
from specround.kernels.reference import AttentionKernel
from specround.kernels.registry import KernelRegistry
from specround.kernels.tree_attention.rows import AttentionRows


class DraftLayers:
    """Registers a layer of vLLM's for each, so that vLLM allocates and counts its KV; our kernels attend over it.

    Windows are the kernels' business: for vLLM every layer is a full one, whose blocks stay as long as the target's.

    Args:
        layers: The declared layers.
        vllm_config: vLLM's configuration, which learns of them.
        registry: Their kernels.
    """

    def __init__(self, layers: Sequence[DraftLayer], vllm_config: Any, registry: KernelRegistry) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._held: dict[str, Any] = {}
        self._kernels: dict[str, AttentionKernel] = {}
        self._write_kv = registry.write_kv
        with set_current_vllm_config(vllm_config):
            for place, layer in enumerate(layers):
                self._held[layer.name] = self._register(place, layer)
                key = "attention:full/verify" if layer.window is None else "attention:sliding/verify"
                descriptor = LayerDescriptor(name=layer.name, verify_key=key, window=layer.window)
                self._kernels[layer.name] = registry.get(key, descriptor)  # type: ignore[assignment]

    @staticmethod
    def _register(place: int, layer: DraftLayer) -> Any:
        return Attention(
            layer.num_kv_heads,
            layer.head_dim,
            layer.head_dim**-0.5,
            num_kv_heads=layer.num_kv_heads,
            prefix=f"specround_draft.{place}.attn",
        )

    def attend(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, rows: AttentionRows, slots: Tensor
    ) -> Tensor:
        """Write the rows' KV to the layer's cache and attend.

        Args:
            name: A declared layer.
            query: `[N, H, D]`.
            key: `[N, Hkv, D]`.
            value: `[N, Hkv, D]`.
            rows: What each row sees.
            slots: `[N]` flat slots, 0 = nothing is written.

        Raises:
            ConfigError: No such layer was declared.
        """
        if name not in self._layers:
            known = ", ".join(self._layers) or "none declared"
            raise ConfigError("draft layer", name, f"one of the declared ones: {known}")
        key_cache, value_cache = split_cache(self._held[name].kv_cache)
        self._write_kv(key_cache, value_cache, key, value, slots)
        return self._kernels[name](
            query,
            key_cache,
            value_cache,
            rows,
            scale=query.shape[-1] ** -0.5,
            window=self._layers[name].window,
            sinks=None,
            softcap=None,
        )
