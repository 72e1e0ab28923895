"""Causal convolution over trees in plain torch: one gather per tap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specround.kernels.state_rows import StateRows
from specround.kernels.state_walk import places_of, rows_of_levels


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvCache:
    """What a convolution of width K over D channels keeps.

    Attributes:
        windows: `[B, K - 1, D]`, the last inputs of each state block, oldest first; block 0 is the null block.
        row_inputs: `[S, D]`, inputs of draft rows in mode "replay"; slot 0 is the null slot. S = 0 in mode "slots".
    """

    windows: Tensor
    row_inputs: Tensor

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        num_row_slots: int,
        *,
        channels: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> ConvCache:
        """A cache of zeros.

        Args:
            num_blocks: B, the null block included.
            num_row_slots: S, the null slot included; 0 in mode "slots".
            channels: D.
            width: K.
            dtype: The dtype of the convolution's input, whose bits are kept.
            device: Where.
        """
        return cls(
            windows=torch.zeros(num_blocks, width - 1, channels, dtype=dtype, device=device),
            row_inputs=torch.zeros(num_row_slots, channels, dtype=dtype, device=device),
        )


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, cache: ConvCache, rows: StateRows) -> Tensor:
    """Depthwise convolution of each row over itself and its K - 1 nearest ancestors, without an activation.

    Args:
        x: `[N, D]`.
        weight: `[D, K]`, the last column for the row itself.
        bias: `[D]` or None.
        cache: Read and written: committed windows, and of draft rows their windows (mode "slots") or inputs ("replay").
        rows: The rows of this forward.

    Returns:
        `[N, D]` in the dtype of x; unused rows hold anything.
    """
    width = weight.shape[1]
    windows = _folded_window(cache, rows)
    inputs = torch.cat([windows.flatten(0, 1).to(x.dtype), x])
    taps = rows.taps(width)
    out = _convolve(inputs, taps, weight, bias)
    _store(inputs.to(windows.dtype), taps, cache, rows)
    return out


def fold_window(cache: ConvCache, rows: StateRows) -> None:
    """Fold the pending path into the committed windows and do nothing else: a flush, without rows of a step.

    Args:
        cache: Its windows are written in place.
        rows: Names the blocks and the pending path; its other fields are not read.
    """
    cache.windows.index_copy_(0, rows.committed_block, _folded_window(cache, rows))


def _folded_window(cache: ConvCache, rows: StateRows) -> Tensor:
    """`[R, K - 1, D]`: the newest entries of each window with the pending inputs behind it; stores snapshots."""
    windows = cache.windows.index_select(0, rows.committed_block)
    pending = rows.pending
    if pending is None:
        return windows
    _, entries, channels = windows.shape
    inputs = cache.row_inputs.index_select(0, pending.slots.flatten()).view(*pending.slots.shape, channels)
    both = torch.cat([windows, inputs], 1)
    entry = torch.arange(entries, device=windows.device)

    def after(steps: Tensor) -> Tensor:
        return both.gather(1, (steps[:, None] + entry)[:, :, None].expand(-1, -1, channels))

    if pending.snapshot_after is not None and pending.snapshot_block is not None:
        block = torch.where(pending.snapshot_after > 0, pending.snapshot_block, 0)
        cache.windows.index_copy_(0, block, after(pending.snapshot_after))
    return after(pending.length)


def _convolve(inputs: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[N, D]`: bias, then taps oldest first; products and sums are rounded one by one, as in decoding."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    total = None if bias is None else bias.to(wide)
    for tap in range(taps.shape[1]):
        term = inputs.index_select(0, taps[:, tap]).to(wide) * weight[:, tap].to(wide)
        total = term if total is None else term.add_(total)
    assert total is not None, "a convolution of width 0"
    return total.to(inputs.dtype)


def _store(inputs: Tensor, taps: Tensor, cache: ConvCache, rows: StateRows) -> None:
    """Store each request's window, and of each draft row its window or its input.

    `inputs` is `[R * (K - 1) + N, D]`: folded windows, then packed rows.
    """
    requests, entries = rows.num_requests, taps.shape[1] - 1
    request = torch.arange(requests, device=taps.device)
    unchanged = (request * entries)[:, None] + torch.arange(entries, device=taps.device)
    left = torch.cat([taps[:, 1:], unchanged])
    last = torch.where(rows.last_row < rows.num_rows, rows.last_row, rows.num_rows + request)
    cache.windows.index_copy_(0, rows.committed_block, inputs[left[last]])
    plan_rows = rows_of_levels(rows)
    index = plan_rows.clamp(max=rows.num_rows - 1)
    if rows.mode == "slots":
        cache.windows.index_copy_(0, places_of(rows.row_block, plan_rows), inputs[taps[index, 1:]])
    else:
        kept = inputs.index_select(0, requests * entries + index)
        cache.row_inputs.index_copy_(0, places_of(rows.row_slot, plan_rows), kept)
