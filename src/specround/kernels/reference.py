"""`ReferenceKernels`: the built-in provider, made of the plain torch ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from specround.contract import LayerDescriptor, SpecKernel, SpecLimit, SpecResources
from specround.kernels.kv_cache.naive import commit_kv
from specround.kernels.reference_states import state_kernels
from specround.kernels.tree_attention.naive import tree_attention
from specround.kernels.tree_attention.rows import AttentionRows

_CHAIN_FEATURES = {
    "alibi": "ALiBi biases are measured by slot, not by tree position",
    "chunked_local": "chunked local attention cuts chunks by slot, not by tree position",
    "kv_sharing": "a layer that shares another layer's KV has no tree commit",
    "kv_scales": "KV quantised with separate scales has no commit kernel that moves the scales",
}


WriteKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Writes rows to paged slots: key cache, value cache, key, value, slots; see `kv_cache.naive.write_kv`."""


class AttentionKernel(SpecKernel, Protocol):
    """What `attention:*/verify` kernels are called with; see `tree_attention`."""

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
        """Attend packed rows over paged KV."""
        ...


class PagedCommitKernel(SpecKernel, Protocol):
    """What `layout:paged_token/commit` is called with; see `commit_kv`."""

    def __call__(self, caches: Iterable[Tensor], source: Tensor, target: Tensor) -> None:
        """Move slots to slots in every cache."""
        ...


class ReferenceAttention:
    """Tree attention over paged KV in plain torch; verifies masks."""

    op = staticmethod(tree_attention)
    """What computes; a kernel that differs in nothing else replaces it."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        """`"mask"`, or `"chain"` for a feature measured by slots or unknown here."""
        return _by_features(layer)

    def bind(self, resources: SpecResources) -> None:
        """Nothing to prepare."""

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
        """Attend packed rows over paged KV."""
        return self.op(query, key_cache, value_cache, rows, scale=scale, window=window, sinks=sinks, softcap=softcap)


class ReferencePagedCommit:
    """KV commit of paged slots in plain torch."""

    op = staticmethod(commit_kv)
    """What computes; a kernel that differs in nothing else replaces it."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        """`"mask"`, or `"chain"` for KV it cannot move whole and for unknown features."""
        return _by_features(layer)

    def bind(self, resources: SpecResources) -> None:
        """Nothing to prepare."""

    def __call__(self, caches: Iterable[Tensor], source: Tensor, target: Tensor) -> None:
        """Move slots to slots in every cache."""
        self.op(caches, source, target)


class ReferenceKernels(dict[str, SpecKernel]):
    """The built-in kernels by key; the provider that every other one overlays."""

    def __init__(self) -> None:
        attention = ReferenceAttention()
        super().__init__({f"attention:{kind}/verify": attention for kind in ("full", "sliding", "mla")})
        self["layout:paged_token/commit"] = ReferencePagedCommit()
        self.update(state_kernels())


def _by_features(layer: LayerDescriptor) -> SpecLimit:
    unknown = "feature {!r} is unknown to the built-in kernels"
    reasons = [_CHAIN_FEATURES.get(name) or unknown.format(name) for name in sorted(layer.features)]
    return SpecLimit("chain", "; ".join(reasons)) if reasons else SpecLimit("mask")
