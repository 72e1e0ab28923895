"""The attention backend of the round: our kernels over vLLM's paged KV, prompts, chains, trees and masks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import KVCacheLayout

from specround.kernels.kv_cache.naive import write_kv
from specround.kernels.reference import AttentionKernel, ReferenceAttention
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


class RoundAttention(CPUAttentionBackendImpl):
    """Attention of one layer.

    `kernel` is the registry's; the worker replaces it when a provider overlays it.
    """

    kernel: AttentionKernel = ReferenceAttention()

    @property
    def round_window(self) -> int | None:
        """Sliding window in tokens, or None."""
        return None if self.sliding_window < 0 else int(self.sliding_window)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the rows' keys and values; a row without a slot writes nothing."""
        key_cache, value_cache = split_cache(kv_cache)
        count = slot_mapping.shape[0]
        write_kv(key_cache, value_cache, key[:count], value[:count], slot_mapping.to(torch.int64).clamp(min=0))

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
            output_scale: None; quantised outputs are not asked for on a CPU.
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
            softcap=self.logits_soft_cap or None,
        )
        output[:count].view(count, self.num_heads, self.head_size).copy_(attended)
        return output


class RoundBackend(CPUAttentionBackend):
    """Stands in for vLLM's CPU backend when a speculator of ours is hosted."""

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
