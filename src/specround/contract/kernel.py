"""Kernel keys and the protocol a kernel answers to; providers supply kernels by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specround.contract.capabilities import SpecLimit
from specround.contract.resources import SpecResources

KERNEL_KEYS: tuple[str, ...] = (
    "attention:full/verify",
    "attention:sliding/verify",
    "attention:mla/verify",
    *(f"mamba:{op}@{mode}/verify" for op in ("gdn", "kda", "mamba2") for mode in ("slots", "replay")),
    *(f"conv:short@{mode}/verify" for mode in ("slots", "replay")),
    "layout:paged_token/commit",
    *(f"layout:mamba_state@{mode}/commit" for mode in ("slots", "replay")),
)
"""Every key a provider may supply: `layer kind / op`."""


@dataclass(frozen=True, kw_only=True)
class LayerDescriptor:
    """What the round needs to know about one target layer.

    Attributes:
        name: The layer's name, for messages.
        verify_key: Kernel key of its verify op, for example `"attention:full/verify"`.
        other_keys: Further kernels its verification needs, for example a recurrent layer's convolution.
        commit_key: Kernel key of its commit op, or None when it has nothing to commit.
        window: Sliding window in tokens, or None.
        has_sinks: Attention sinks.
        softcap: Logits soft cap, or None.
        features: Names of further features a kernel may decline, for example `"alibi"`, `"chunked_local"`,
            `"kv_sharing"`, `"kv_scales"`.
    """

    name: str
    verify_key: str
    other_keys: tuple[str, ...] = ()
    commit_key: str | None = "layout:paged_token/commit"
    window: int | None = None
    has_sinks: bool = False
    softcap: float | None = None
    features: frozenset[str] = frozenset()


@runtime_checkable
class SpecKernel(Protocol):
    """A kernel speculation runs: it says what it supports, is bound once, and is called by its op's signature."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        """The highest plan kind for that layer, with the reason why not more; `"none"` declines."""
        ...

    def bind(self, resources: SpecResources) -> None:
        """Called once with the effective resources, before the first step."""
        ...


KernelProvider = Callable[[], Mapping[str, SpecKernel]]
"""A factory of kernels by key; any subset of `KERNEL_KEYS`."""
