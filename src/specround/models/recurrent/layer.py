"""`RecurrentLayer`: one recurrent mixer's caches and kernels; the mixer calls its ops once per forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specround.contract import LayerDescriptor, SpecLimit
from specround.kernels.causal_conv.naive import ConvCache
from specround.kernels.gated_delta_rule.naive import DeltaRuleCache
from specround.kernels.selective_state.naive import ScanCache, SelectiveStateCache, selective_scan

if TYPE_CHECKING:
    from specround.kernels.reference_states import ConvKernel, DeltaRuleKernel, SelectiveStateKernel
    from specround.kernels.registry import KernelRegistry
    from specround.kernels.state_rows import StateMode, StateRows
    from specround.models.attention import ForwardContext

StateOp = Literal["gdn", "kda", "mamba2", "mamba1", "none"]
"""What updates a layer's state; "none": the layer has only a convolution window."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What one layer stores per state block, and per row of a draft.

    Attributes:
        op: What updates the state.
        conv_channels: Channels of the causal convolution.
        conv_width: K; the window holds K - 1 inputs.
        num_heads: Value heads, or channels for "mamba1"; 0 without a state.
        num_key_heads: Key heads, or groups of B and C.
        key_dim: Elements of a key, or of B.
        value_dim: Elements of a value, or of x per head.
    """

    op: StateOp
    conv_channels: int
    conv_width: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class RecurrentLayer:
    """One layer's caches and kernels.

    Args:
        name: For messages.
        context: Shared with the other layers of the model; its `states` say what each row starts from.
        shape: What the layer stores.
        limit: The highest plan kind that its mixer declares, and why not more.
    """

    def __init__(self, name: str, context: ForwardContext, shape: StateShape, limit: SpecLimit) -> None:
        self.name, self.context, self.shape, self.limit = name, context, shape, limit
        self.conv_cache: ConvCache | None = None
        self.state_cache: DeltaRuleCache | SelectiveStateCache | ScanCache | None = None
        self._conv: ConvKernel | None = None
        self._rule: DeltaRuleKernel | SelectiveStateKernel | None = None

    def descriptor(self, mode: StateMode) -> LayerDescriptor:
        """What the kernel registry needs to know about the layer."""
        conv = f"conv:short@{mode}/verify"
        has_rule = self.shape.op in ("gdn", "kda", "mamba2")
        return LayerDescriptor(
            name=self.name,
            verify_key=f"mamba:{self.shape.op}@{mode}/verify" if has_rule else conv,
            other_keys=(conv,) if has_rule else (),
            commit_key=f"layout:mamba_state@{mode}/commit",
        )

    def bind(
        self, registry: KernelRegistry, mode: StateMode, num_blocks: int, num_row_slots: int, like: Tensor
    ) -> None:
        """Allocate the caches and take the kernels.

        Args:
            registry: Which kernels run.
            mode: How states of drafts are kept.
            num_blocks: State blocks, the null block included.
            num_row_slots: Row-buffer slots, the null slot included; 0 in mode "slots".
            like: A tensor of the model's dtype and device.
        """
        shape, device, descriptor = self.shape, like.device, self.descriptor(mode)
        self._conv = registry.get(f"conv:short@{mode}/verify", descriptor)  # type: ignore[assignment]
        self.conv_cache = ConvCache.zeros(
            num_blocks,
            num_row_slots,
            channels=shape.conv_channels,
            width=shape.conv_width,
            dtype=like.dtype,
            device=device,
        )
        if shape.op in ("gdn", "kda", "mamba2"):
            self._rule = registry.get(f"mamba:{shape.op}@{mode}/verify", descriptor)  # type: ignore[assignment]
        if shape.op in ("gdn", "kda"):
            self.state_cache = DeltaRuleCache.zeros(
                num_blocks,
                num_row_slots,
                key_heads=shape.num_key_heads,
                value_heads=shape.num_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                channel_decay=shape.op == "kda",
                device=device,
            )
        elif shape.op == "mamba2":
            self.state_cache = SelectiveStateCache.zeros(
                num_blocks,
                num_row_slots,
                heads=shape.num_heads,
                groups=shape.num_key_heads,
                head_dim=shape.value_dim,
                state_dim=shape.key_dim,
                device=device,
            )
        elif shape.op == "mamba1":
            self.state_cache = ScanCache.zeros(
                num_blocks, channels=shape.num_heads, state_dim=shape.key_dim, device=device
            )

    def caches(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each cache, `[blocks, ...]`, that holds committed state."""
        assert self.conv_cache is not None
        found = [("conv", self.conv_cache.windows)]
        if self.state_cache is not None:
            found.append(("state", self.state_cache.states))
        return found

    def flush(self, rows: StateRows) -> None:
        """Fold pending paths into window and state, with no rows in the step."""
        assert self._conv is not None
        assert self.conv_cache is not None
        self._conv.fold(self.conv_cache, rows)
        if self._rule is not None:
            self._rule.fold(self.state_cache, rows)  # type: ignore[arg-type]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal convolution over each row's path, without activation.

        Args:
            x: `[N, D]`.
            weight: `[D, K]`.
            bias: `[D]` or None.

        Returns:
            `[N, D]`.
        """
        assert self._conv is not None
        assert self.conv_cache is not None
        return self._conv(x, weight, bias, self.conv_cache, self._rows)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule; see `gated_delta_rule`. Returns `[N, Hv, Dv]` float32."""
        assert isinstance(self.state_cache, DeltaRuleCache)
        return self._rule(query, key, value, log_decay, beta, self.state_cache, self._rows)  # type: ignore[call-arg, misc, arg-type]

    def selective_state(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        """State space with a scalar decay per head; see `selective_state`. Returns `[N, H, P]` float32."""
        assert isinstance(self.state_cache, SelectiveStateCache)
        return self._rule(x, dt, a, b, c, d, self.state_cache, self._rows)  # type: ignore[call-arg, misc, arg-type]

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """State space with a decay per channel and state; see `selective_scan`. Returns `[N, E]` float32."""
        assert isinstance(self.state_cache, ScanCache)
        return selective_scan(x, dt, a, b, c, d, self.state_cache, self._rows)

    @property
    def _rows(self) -> StateRows:
        assert self.context.states is not None
        return self.context.states


def bytes_per_state(shape: StateShape, dtype: torch.dtype) -> tuple[int, int]:
    """Memory of one state block, and of one row-buffer slot, in bytes."""
    window = shape.conv_channels * (shape.conv_width - 1) * dtype.itemsize
    row = shape.conv_channels * dtype.itemsize
    state = shape.num_heads * shape.key_dim * shape.value_dim
    if shape.op in ("gdn", "kda"):
        decay = shape.num_heads * (shape.key_dim if shape.op == "kda" else 1)
        kept = shape.num_key_heads * shape.key_dim + shape.num_heads * (shape.value_dim + 1) + decay
    elif shape.op == "mamba2":
        kept = shape.num_heads * (shape.value_dim + 1) + shape.num_key_heads * shape.key_dim
    else:
        kept = 0
    return window + 4 * state, row + 4 * kept
