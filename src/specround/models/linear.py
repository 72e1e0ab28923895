"""Projections as the fused decoder calls them: dense, or with weights packed to 8 or 4 bits for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from specround.contract import ModelError

Projection = Callable[[Tensor], Tensor]
"""`[N, in]` to `[N, out]`."""

Quantization = Literal["int8", "int4", "w8a8"]

INT4_GROUP = 32
"""Input elements that share a scale and a zero point in int4, as in the common 4-bit files."""

_PACKED_ROWS = 8
"""Rows that packed bfloat16 weights are laid out for; other counts work too."""


class DenseLinear:
    """`x @ weight.T + bias`.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]`."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """`x @ weight.T + bias` in bfloat16 on a CPU, the weight in the blocks that oneDNN multiplies fastest.

    A third faster than torch's own product for up to 16 rows, and never slower.

    Args:
        weight: `[out, in]` bfloat16; not kept.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        self.bias = bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight can be packed here."""
        is_cpu_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        return is_cpu_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


class Int8Linear:
    """Weights of 8 bits with one scale per output, activations in bfloat16 (torch's own packed kernel).

    Args:
        weight: `[out, in]`, any float type; not kept.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, scale = _to_int8(weight)
        self.scale, self.bias = scale.to(torch.bfloat16), bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` bfloat16 to `[N, out]` bfloat16."""
        out = torch._weight_int8pack_mm(x.contiguous(), self.weight, self.scale)
        return out if self.bias is None else out + self.bias


class Int4Linear:
    """Weights of 4 bits, `INT4_GROUP` inputs to a scale and a zero point, activations in bfloat16.

    Args:
        weight: `[out, in]`, any float type; not kept. `out` is a multiple of 16, `in` of the group.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        out_features, in_features = weight.shape
        groups = weight.float().view(out_features, -1, INT4_GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16).float()
        levels = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).view(out_features, in_features)
        zero = low + 8 * scale  # the kernel computes (level - 8) * scale + zero
        self.scale_and_zero = torch.cat([scale, zero], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.bias = bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether a weight's shape can be packed."""
        return weight.shape[0] % 16 == 0 and weight.shape[1] % INT4_GROUP == 0

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` bfloat16 to `[N, out]` bfloat16."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.weight, INT4_GROUP, self.scale_and_zero
        )
        return out if self.bias is None else out + self.bias


class W8A8Linear:
    """Weights and activations of 8 bits: one scale per output and one per row, products summed in 32-bit integers.

    The integer product is exact, so a row's result does not depend on which other rows are multiplied with it.

    Args:
        weight: `[out, in]`, any float type; not kept.
        bias: `[out]` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        levels, scale = _to_int8(weight)
        self.weight = levels.t()  # a view: torch's kernel wants [in, out] and reads a transposed matrix fastest
        self.scale, self.bias = scale / 127, bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, in]` to `[N, out]` of the same floating type."""
        peak = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).tiny)
        levels = torch.div(x, peak).mul_(127).round_().to(torch.int8)
        out = (torch._int_mm(levels, self.weight) * peak.float()).mul_(self.scale).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels `[out, in]` int8 and scale `[out]` float32 of a weight."""
    scale = weight.float().abs().amax(1).clamp(min=1e-8) / 127
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous(), scale


def make_projection(weight: Tensor, bias: Tensor | None, quantization: Quantization | None) -> Projection:
    """A projection of a weight; a shape that int4 cannot pack is packed to int8. Only `DenseLinear` keeps the weight.

    Raises:
        ModelError: Packed weights were asked for on another device than a CPU.
    """
    if quantization is None:
        return PackedLinear(weight, bias) if PackedLinear.fits(weight) else DenseLinear(weight, bias)
    if weight.device.type != "cpu":
        raise ModelError("quantization", quantization, "None on a GPU: packed weights run on a CPU only")
    if quantization == "w8a8":
        return W8A8Linear(weight, bias)
    if quantization == "int4" and Int4Linear.fits(weight):
        return Int4Linear(weight, bias)
    return Int8Linear(weight, bias)
