"""How the Triton tree attention is launched: tile sizes and splits of the keys, from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from specround.kernels.tree_attention.rows import AttentionRows

_PROGRAMS_PER_PROCESSOR = 4
_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """Sizes of one launch.

    Attributes:
        block_rows: Query rows of a tile, each packed row once for each query head of a key head.
        block_keys: Keys folded in at a time.
        num_splits: Programs that share the keys of a tile, whose results a second launch joins.
        num_warps: Warps of a program.
        num_stages: Key blocks under way at a time.
    """

    block_rows: int
    block_keys: int
    num_splits: int
    num_warps: int
    num_stages: int


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`.

    Example:
        >>> power_of_two(96)
        128
    """
    return 1 << max(count - 1, 0).bit_length()


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for Triton's interpreter on a CPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def choose_shape(
    rows: AttentionRows,
    *,
    key_heads: int,
    repeats: int,
    width: int,
    element_size: int,
    window: int | None,
    device: torch.device,
) -> LaunchShape:
    """Sizes for some rows, the same for every layer of a kind.

    Args:
        rows: The rows of a forward.
        key_heads: Key/value heads.
        repeats: Query heads of each.
        width: The wider of key and value, in elements.
        element_size: Bytes of an element of the query, in whose type products are computed.
        window: Sliding window of the layer, which bounds the keys a row reads.
        device: Where it runs.
    """
    wide = max(16, power_of_two(width)) * element_size
    most = 128 if wide <= 256 else 64 if wide <= 512 else 16
    wanted = power_of_two(max(rows.counts, default=1) * repeats)
    block_rows = max(16, min(wanted, most), power_of_two(repeats))
    block_keys = 64 if wide <= 256 else 32 if wide <= 512 else 16
    tiles = sum(-(-count // (block_rows // repeats)) for count in rows.counts)
    programs = max(1, tiles * key_heads)
    longest = max(rows.bounds, default=1)
    if window is not None:
        longest = min(longest, window + max(rows.counts, default=1))
    splits = -(-_PROGRAMS_PER_PROCESSOR * num_processors(device) // programs)
    splits = max(1, min(splits, -(-longest // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS))
    return LaunchShape(
        block_rows=block_rows,
        block_keys=block_keys,
        num_splits=splits if device.type == "cuda" else 1,
        num_warps=8 if block_rows >= 128 else 4,
        num_stages=3 if wide <= 256 else 2,
    )
