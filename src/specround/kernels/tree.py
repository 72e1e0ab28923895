"""Tree tables: parents to depths and ancestor bits, masks to bits, bits to int32 words.

A set of columns is one int64 per row, bit j for column j; C <= 64, so bit 63 is the sign and every shift is masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TreeTables:
    """What a tree's parents determine.

    Attributes:
        depth: `[R, C]` int32, root = 0.
        ancestors: `[R, C]` int64, bit j set if column j is the row itself or one of its ancestors.
    """

    depth: Tensor
    ancestors: Tensor


def column_bits(columns: int, device: torch.device) -> Tensor:
    """`[C]` int64 with bit c set in element c, C <= 64."""
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(columns, device=device)


def tree_tables(parents: Tensor) -> TreeTables:
    """Depths and ancestors by pointer jumping: log2(C) gathers, no loop over rows.

    Args:
        parents: `[R, C]` integer, parent column, -1 for a root. Each parent is smaller than its own column.

    Example:
        >>> tree_tables(torch.tensor([[-1, 0, 0, 2]])).depth
        tensor([[0, 1, 1, 2]], dtype=torch.int32)
    """
    columns = parents.shape[1]
    jump = parents.to(torch.int64).clamp(-1, columns - 1)
    bits = column_bits(columns, parents.device).expand_as(jump)
    depth = (jump >= 0).to(torch.int32)
    for _ in range(max(columns - 1, 1).bit_length()):
        live, target = jump >= 0, jump.clamp(min=0)
        bits = bits | torch.where(live, bits.gather(1, target), 0)
        depth = depth + torch.where(live, depth.gather(1, target), 0)
        jump = torch.where(live, jump.gather(1, target), -1)
    return TreeTables(depth, bits)


def mask_bits(mask: Tensor) -> Tensor:
    """A plan's mask as bits: only j < i is read, and a row always sees itself.

    Args:
        mask: `[R, C, C]` bool, `mask[r, i, j]`: row i sees row j.

    Returns:
        `[R, C]` int64.
    """
    columns = mask.shape[1]
    bits = column_bits(columns, mask.device)
    return torch.where(mask.tril(-1), bits, 0).sum(-1) | bits


def has_bit(bits: Tensor, columns: Tensor) -> Tensor:
    """Whether a bit is set; false outside 0..63.

    Args:
        bits: int64, any shape.
        columns: Integer tensor that broadcasts with `bits`.

    Returns:
        bool, the broadcast shape.
    """
    inside = (columns >= 0) & (columns < 64)
    return inside & (((bits >> columns.clamp(0, 63)) & 1) == 1)


def pack_words(bits: Tensor, columns: int) -> Tensor:
    """Bits as the int32 words that device kernels read.

    Args:
        bits: `[...]` int64.
        columns: C; the result has `ceil(C / 32)` words.

    Returns:
        `[..., ceil(C / 32)]` int32, low columns first.
    """
    words = [(bits >> shift) & 0xFFFFFFFF for shift in range(0, columns, 32)]
    stacked = torch.stack(words, -1)
    return torch.where(stacked >= 2**31, stacked - 2**32, stacked).to(torch.int32)


def committable_rows(tables: TreeTables, visible: Tensor, positions: Tensor | None) -> Tensor:
    """Rows that may be accepted: they and all their ancestors see exactly their ancestors at position = depth.

    Args:
        tables: The plan's tree.
        visible: `[R, C]` int64, columns each row sees, itself included.
        positions: `[R, C]` int32 offsets from the root, or None = depth.

    Returns:
        `[R, C]` bool.
    """
    own = visible == tables.ancestors
    if positions is not None:
        own = own & (positions == tables.depth)
    clean = torch.where(own, column_bits(own.shape[1], own.device), 0).sum(-1, keepdim=True)
    return (tables.ancestors & ~clean) == 0
