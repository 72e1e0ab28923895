"""The Triton kernels by key: what a GPU's registry lays over the reference kernels. Importing it needs Triton.

As a provider they run on a CPU too, in Triton's interpreter: `spec_kernel_providers = (triton_kernels,)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from specround.contract import SpecKernel
from specround.kernels.kv_cache.triton import commit_kv, write_kv
from specround.kernels.reference import ReferenceAttention, ReferencePagedCommit
from specround.kernels.tree_attention.triton import tree_attention

__all__ = ["TritonAttention", "TritonPagedCommit", "triton_kernels", "write_kv"]


class TritonAttention(ReferenceAttention):
    """Tree attention over paged KV in Triton; verifies what the reference does."""

    op = staticmethod(tree_attention)


class TritonPagedCommit(ReferencePagedCommit):
    """KV commit of paged slots in Triton."""

    op = staticmethod(commit_kv)


def triton_kernels() -> Mapping[str, SpecKernel]:
    """A kernel provider: every op that has a Triton kernel."""
    attention = TritonAttention()
    keys = (f"attention:{kind}/verify" for kind in ("full", "sliding", "mla"))
    return {**dict.fromkeys(keys, attention), "layout:paged_token/commit": TritonPagedCommit()}
