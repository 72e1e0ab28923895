"""`KVCache`: the paged KV of every layer, target and draft, on one set of block ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specround.models.attention import KVShape


class KVCache:
    """Keys and values in `num_blocks` usable blocks plus the null block 0, which always holds zeros.

    Layers that share a shape and dtype live in one tensor, so that a commit is one operation for all of them.

    Args:
        layers: Shape and dtype of each layer, target layers first.
        num_blocks: Usable blocks.
        block_size: Tokens per block.
        device: Where they live.
    """

    def __init__(
        self,
        layers: Sequence[tuple[KVShape, torch.dtype]],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        slots = (num_blocks + 1) * block_size
        members: dict[tuple[KVShape, torch.dtype], list[int]] = {}
        for index, layer in enumerate(layers):
            members.setdefault(layer, []).append(index)
        self.tensors: list[Tensor] = []
        """Every cache tensor, `[layers of the shape, slots, heads, elements]`: what a commit moves."""
        self.layers: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(layers)
        """`(key, value)` of each layer, `[slots, heads, elements]`."""
        for (shape, dtype), indices in members.items():
            heads = (len(indices), slots, shape.num_kv_heads)
            keys = torch.zeros(*heads, shape.key_dim, dtype=dtype, device=device)
            values = torch.zeros(*heads, shape.value_dim, dtype=dtype, device=device)
            self.tensors += [keys, values]
            for place, index in enumerate(indices):
                self.layers[index] = (keys[place], values[place])


def bytes_per_block(layers: Sequence[tuple[KVShape, torch.dtype]], block_size: int) -> int:
    """Memory of one block over all layers, in bytes."""
    return block_size * sum(
        shape.num_kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize for shape, dtype in layers
    )
