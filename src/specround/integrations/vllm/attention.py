"""The attention backend of the round: our kernels over vLLM's paged KV, prompts, chains, trees and masks alike.

It is the same on every device: the kernels are the registry's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheLayout

from specround.contract import ConfigError
from specround.kernels.kv_cache.naive import write_kv
from specround.kernels.reference import AttentionKernel, ReferenceAttention, WriteKV
from specround.kernels.tree_attention.rows import AttentionRows


@dataclass(frozen=True, eq=False)
class RoundMetadata:
    """What a layer's attention is called with.

    Attributes:
        rows: Which keys each row sees; None in a dummy run, whose output is zero.
        slots: `[T]` int64, flat cache slot of each row, -1 = nothing is written.
        num_actual_tokens: T, rows without padding.
    """

    rows: AttentionRows | None
    slots: Tensor
    num_actual_tokens: int


class RoundMetadataBuilder(AttentionMetadataBuilder):
    """Hands the rows that the runner laid out to the layers of its group."""

    rows: AttentionRows | None = None
    """Set by the runner before each forward, used once."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RoundMetadata:
        """The metadata of a step. Only the number of rows and their slots are vLLM's."""
        rows, self.rows = self.rows, None
        count = int(common_attn_metadata.num_actual_tokens)
        return RoundMetadata(rows, common_attn_metadata.slot_mapping[:count], count)


class RoundAttention(AttentionImpl):
    """Attention of one layer.

    `kernel` and `write_kv` are replaced by the registry's once the target is loaded.

    Args:
        num_heads: Query heads, H.
        head_size: Elements of a head, D.
        scale: Multiplies the scores.
        num_kv_heads: Key/value heads; None = H.
        alibi_slopes: Lower the layer to chains.
        sliding_window: Window in tokens, or None.
        kv_cache_dtype: As vLLM names it.
        logits_soft_cap: Soft cap of the scores; None or 0 = none.
        attn_type: As vLLM names it; the backend takes decoders only.
        kv_sharing_target_layer_name: Lowers the layer to chains.
        sinks: `[H]`, or None.
        others: Arguments of layers that are not covered.

    Raises:
        ConfigError: A layer asks for something else.
    """

    kernel: AttentionKernel = ReferenceAttention()
    write_kv: WriteKV = staticmethod(write_kv)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: object,
    ) -> None:
        for name, value in others.items():
            if value is not None:
                raise ConfigError(f"attention layer's {name}", value, "None: the attention kernels do not take it")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.round_window = sliding_window
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the rows' keys and values; a row without a slot writes nothing."""
        key_cache, value_cache = split_cache(kv_cache)
        count = slot_mapping.shape[0]
        self.write_kv(key_cache, value_cache, key[:count], value[:count], slot_mapping.to(torch.int64).clamp(min=0))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: RoundMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend the step's rows.

        Args:
            layer: vLLM's layer.
            query: `[T, H, D]`, possibly padded.
            key: `[T, Hkv, D]`; already in the cache.
            value: `[T, Hkv, D]`; already in the cache.
            kv_cache: `[blocks, block size, Hkv, 2 D]`.
            attn_metadata: The step, None while memory is measured.
            output: Written in place.
            output_scale: None; `fused_output_quant_supported` declines quantised outputs.
            output_block_scale: None likewise.
        """
        if attn_metadata is None:
            return output
        count = attn_metadata.num_actual_tokens
        if attn_metadata.rows is None:
            output.zero_()
            return output
        key_cache, value_cache = split_cache(kv_cache)
        attended = self.kernel(
            query[:count].view(count, self.num_heads, self.head_size),
            key_cache,
            value_cache,
            attn_metadata.rows,
            scale=self.scale,
            window=self.round_window,
            sinks=self.sinks,
            softcap=self.logits_soft_cap,
        )
        output[:count].view(count, self.num_heads, self.head_size).copy_(attended)
        return output


class RoundBackend(AttentionBackend):
    """Stands in for vLLM's backends when a speculator of ours is hosted; any head size, decoders only."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Its name in vLLM's table of backends, the one for backends of others."""
        return "CUSTOM"

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks take part in the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows measure logical positions."""
        return True

    @staticmethod
    def get_impl_cls() -> type[RoundAttention]:
        """The layers' attention."""
        return RoundAttention

    @staticmethod
    def get_builder_cls() -> type[RoundMetadataBuilder]:
        """The metadata's builder."""
        return RoundMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Slot after slot in memory: what commit moves is one row."""
        return (KVCacheLayout.LBNHC,)


def split_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[slots, Hkv, D]` of a layer's cache, as views.

    Args:
        kv_cache: `[blocks, Hkv, block size, 2 D]`, in memory `[blocks, block size, Hkv, 2 D]`.
    """
    flat = slot_rows(kv_cache)
    size = flat.shape[-1] // 2
    return flat[..., :size], flat[..., size:]


def slot_rows(kv_cache: Tensor) -> Tensor:
    """A layer's cache slot by slot, `[slots, Hkv, 2 D]`, as a view.

    Args:
        kv_cache: As in `split_cache`.

    Raises:
        RuntimeError: It lies otherwise in memory.
    """
    by_slot = kv_cache.transpose(1, 2)
    return by_slot.view(by_slot.shape[0] * by_slot.shape[1], *by_slot.shape[2:])
