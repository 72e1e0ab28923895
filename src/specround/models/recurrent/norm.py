"""Norms inside recurrent mixers, in float32 and per group as the original implementations compute them.

transformers has computed the gated norm of some models over the full width in one version and per group in the next.
Here it is per group, always: a group holds the channels of `width / groups` consecutive elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Order = Literal["gate first", "norm first"]
"""Whether the norm sees gated values or the gate multiplies normed ones."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """RMSNorm of each group of the last dimension.

    Args:
        x: `[..., D]`, any floating type.
        weight: `[D]`, or None.
        eps: Added to the mean square.
        groups: Parts of equal size that are normed on their own.

    Returns:
        `[..., D]` float32.
    """
    parts = x.float().reshape(*x.shape[:-1], groups, -1)
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    return normed if weight is None else normed * weight.float()


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    order: Order,
    groups: int = 1,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Tensor:
    """RMSNorm with a gate.

    Args:
        x: `[..., D]`, any floating type.
        gate: `[..., D]`, before its activation.
        weight: `[D]`.
        eps: Added to the mean square.
        order: Which comes first.
        groups: Parts of equal size that are normed on their own.
        activation: Of the gate.

    Returns:
        `[..., D]` float32.
    """
    opened = activation(gate.float())
    if order == "gate first":
        return rms_norm(x.float() * opened, weight, eps, groups)
    return rms_norm(x, weight, eps, groups) * opened


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
