"""LFM2's short convolution: gate the input, convolve, gate the result. Its window is all the state it has."""

from __future__ import annotations

from torch import Tensor

from specround.models.recurrent.layer import StateShape
from specround.models.recurrent.mixer import TREES, Mixer


class ShortConvMixer(Mixer):
    """Two gates around a convolution without activation."""

    replaces = ("Lfm2ShortConv",)
    verifies = TREES

    @property
    def shape(self) -> StateShape:
        """See the base class."""
        channels, _, width = self.module.conv.weight.shape
        return StateShape(op="none", conv_channels=channels, conv_width=width)

    def mix(self, x: Tensor) -> Tensor:
        """See the base class."""
        module = self.module
        before, after, value = module.in_proj(x).chunk(3, -1)
        convolved = self.ops.convolve(before * value, module.conv.weight[:, 0], module.conv.bias)
        out: Tensor = module.out_proj(after * convolved.to(x.dtype))
        return out
