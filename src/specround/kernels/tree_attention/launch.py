"""How the Triton tree attention is launched: tile sizes and splits of the keys, from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from specround.kernels.tree_attention.rows import AttentionRows

_MIN_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 64
_MAX_STAGES = 3


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
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory a program may use; for Triton's interpreter, those of one."""
    if device.type != "cuda":
        return 1, 227 << 10
    found = torch.cuda.get_device_properties(device)
    memory = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return int(found.multi_processor_count), int(memory)


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
    """Sizes for some rows, the same for every layer of a kind; tuned on a Hopper GPU, within any card's memory.

    Args:
        rows: The rows of a forward.
        key_heads: Key/value heads.
        repeats: Query heads of each.
        width: Elements of a key and its value, each padded to a power of two.
        element_size: Bytes of an element, the wider of query and cache.
        window: Sliding window of the layer, which bounds the keys a row reads.
        device: Where it runs.
    """
    processors, memory = device_limits(device)
    most = max(rows.counts, default=1)
    size = width * element_size
    largest = 128 if size <= 512 else 64 if size <= 1024 else 16
    if element_size > 2:  # float32 runs on the ordinary units, which small tiles keep in registers
        largest = min(largest, 32)
    block_rows = max(16, min(power_of_two(most * repeats), largest), power_of_two(repeats))
    room = memory - block_rows * size // 2
    block_keys = 32 if element_size > 2 else 64 if 16 < block_rows < 128 else 128
    while block_keys > 16 and 2 * block_keys * size > room:
        block_keys //= 2
    tiles = sum(-(-count // (block_rows // repeats)) for count in rows.counts)
    longest = max(rows.bounds, default=1)
    if window is not None:
        longest = min(longest, window + most)
    resident = processors if block_rows >= 128 else 2 * processors  # programs that run at a time
    splits = min(resident // max(1, tiles * key_heads), -(-longest // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS)
    return LaunchShape(
        block_rows=block_rows,
        block_keys=block_keys,
        num_splits=1 << max(splits, 1).bit_length() - 1,
        num_warps=8 if block_rows >= 128 else 4,
        num_stages=max(1, min(_MAX_STAGES, room // (block_keys * size))),
    )
