"""Selective state spaces: Mamba2 over trees, and Mamba1 for plain decoding."""

from __future__ import annotations

from specround.kernels.selective_state.naive import (
    ScanCache,
    SelectiveStateCache,
    fold_selective_state,
    selective_scan,
    selective_state,
)

__all__ = ["ScanCache", "SelectiveStateCache", "fold_selective_state", "selective_scan", "selective_state"]
