"""A speculator that brings one kernel of its own: full attention in float64, to judge other kernels by.

A kernel is an object with `supports` and `bind` that is called by its op's signature, here the one of
`specround.kernels.reference.AttentionKernel`. A provider is a function that returns kernels by key, any subset of
`specround.contract.KERNEL_KEYS`; the built-in kernels keep the other keys.
Run it from this directory: specround generate --model smollm2 --prompt "1 2 3 1 2 3 1 2" \
    --speculative-config '{"method": "kernel_provider:Float64Config", "num_speculative_tokens": 12}'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specround import SpecResources, register_speculator
from specround.contract import LayerDescriptor, SpecKernel, SpecLimit
from specround.kernels.tree_attention.rows import AttentionRows
from specround.speculators.suffix_tree import SuffixTreeConfig


class Float64Attention:
    """Attention over paged KV: one softmax in float64 per row group, without windows, sinks and soft caps."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        """Asked once per layer at start-up: the highest plan kind, or "none" and a reason, which chains the layer."""
        own = {"sinks": layer.has_sinks, "a soft cap": layer.softcap is not None, "a window": layer.window is not None}
        lacking = [name for name, present in own.items() if present] + sorted(layer.features)
        return SpecLimit("none", f"float64 attention lacks {', '.join(lacking)}") if lacking else SpecLimit("mask")

    def bind(self, resources: SpecResources) -> None:
        """Called once with the effective resources; buffers for `resources.max_candidates` rows could be made here."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """Attend N packed rows, prompts and drafts alike; their own keys and values are in the caches already.

        A layer that was declined above verifies chains and keeps the built-in kernel: this one is not called for it.

        Args:
            query: `[N, H, D]`.
            key_cache: `[S, Hkv, D]`, S slots; H is a multiple of Hkv.
            value_cache: `[S, Hkv, Dv]`.
            rows: Which slots each row sees. A recurrent kernel would read `rows.parents` instead.
            scale: Multiplies the scores.
            window: Sliding window in tokens; None, as such layers were declined.
            sinks: `[H]`; None likewise.
            softcap: Soft cap of the scores; None likewise.

        Returns:
            `[N, H, Dv]` in the query's dtype.
        """
        repeats = query.shape[1] // key_cache.shape[1]
        padded = torch.cat([query, query[:1]]).double()  # row N is what padded places of a group name
        out = padded.new_zeros(rows.num_rows + 1, query.shape[1], value_cache.shape[2])
        for group in rows.groups:  # G requests of up to Q rows over L keys each
            keys, values = (
                cache[group.key_slots]
                .double()
                .view(len(group.rows), -1, *cache.shape[1:])
                .repeat_interleave(repeats, 2)
                for cache in (key_cache, value_cache)
            )  # [G, L, H, D]
            scores = torch.einsum("gqhd,glhd->ghql", padded[group.rows], keys) * scale
            weights = scores.masked_fill(~group.visible[:, None], float("-inf")).softmax(-1)
            attended = torch.einsum("ghql,glhd->gqhd", weights, values)
            out[group.rows.flatten()] = attended.flatten(0, 1)
        return out[: rows.num_rows].to(query.dtype)


def float64_attention() -> Mapping[str, SpecKernel]:
    """The provider; its name is what the log says when it overrides a kernel."""
    return {"attention:full/verify": Float64Attention()}


@register_speculator("float64")
@dataclass(frozen=True, kw_only=True)
class Float64Config(SuffixTreeConfig):
    """`suffix_tree` on our kernel: any speculator takes providers, a later one wins a key."""

    spec_kernel_providers = (float64_attention,)
