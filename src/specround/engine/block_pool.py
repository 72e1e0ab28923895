"""`BlockPool`: which KV blocks are free. Block 0 is the null block and never leaves the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Free blocks by id.

    Args:
        num_blocks: Usable blocks; their ids are 1 to `num_blocks`.

    Example:
        >>> pool = BlockPool(4)
        >>> pool.allocate(2), pool.num_free
        ((1, 2), 2)
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` blocks, or none of them (None) when there are not enough."""
        if count > len(self._free):
            return None
        taken = tuple(self._free.popleft() for _ in range(count))
        self._held.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Return blocks; returning one that is not held is a bug of the engine."""
        for block in blocks:
            assert block in self._held, f"block {block} is not held"
            self._held.remove(block)
            self._free.append(block)
