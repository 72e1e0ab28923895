"""Short causal convolution of packed rows along the paths of their trees."""

from __future__ import annotations

from specround.kernels.causal_conv.naive import ConvCache, causal_conv, fold_window

__all__ = ["ConvCache", "causal_conv", "fold_window"]
