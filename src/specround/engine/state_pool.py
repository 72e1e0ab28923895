"""`StatePool`: which recurrent state blocks are free; a request holds a span of them from its start until it leaves."""

from __future__ import annotations

from collections.abc import Iterable

from specround.engine.block_pool import BlockPool


class StatePool:
    """State blocks by spans.

    Args:
        num_blocks: Usable blocks, a multiple of the span or not; ids are 1 to `num_blocks`.
        span: Blocks per request: the committed state's, and in mode "slots" one for each draft.

    Example:
        >>> pool = StatePool(num_blocks=5, span=2)
        >>> pool.allocate(), pool.allocate(), pool.allocate()
        ((1, 2), (3, 4), None)
    """

    def __init__(self, num_blocks: int, span: int) -> None:
        self.span = span
        self._pool = BlockPool(num_blocks)

    @property
    def num_draft_blocks_held(self) -> int:
        """Blocks that requests hold for drafts, beyond their committed states."""
        held = self._pool.num_total - self._pool.num_free
        return held // self.span * (self.span - 1)

    def allocate(self) -> tuple[int, ...] | None:
        """A span, or None when there are not enough blocks."""
        return self._pool.allocate(self.span)

    def free(self, blocks: Iterable[int]) -> None:
        """Return a span."""
        self._pool.free(blocks)
