"""The built-in kernels of recurrent layers, and what such kernels are called with."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specround.contract import AcceptResult, LayerDescriptor, SpecKernel, SpecLimit, SpecResources
from specround.kernels.causal_conv import ConvCache, causal_conv, fold_window
from specround.kernels.gated_delta_rule import DeltaRuleCache, fold_delta_rule, gated_delta_rule
from specround.kernels.selective_state import SelectiveStateCache, fold_selective_state, selective_state
from specround.kernels.state_commit import StateTables, commit_states
from specround.kernels.state_rows import StateRows

_TREES_ONLY = SpecLimit("tree", "a recurrent state folds every ancestor in and cannot hide one")


class ConvKernel(SpecKernel, Protocol):
    """What `conv:short@*/verify` kernels are called with; see `causal_conv`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: ConvCache, rows: StateRows) -> Tensor:
        """Convolve packed rows along their paths and keep what later rounds need."""
        ...

    def fold(self, cache: ConvCache, rows: StateRows) -> None:
        """Fold pending paths into the windows."""
        ...


class DeltaRuleKernel(SpecKernel, Protocol):
    """What `mamba:gdn@*/verify` and `mamba:kda@*/verify` kernels are called with; see `gated_delta_rule`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        cache: DeltaRuleCache,
        rows: StateRows,
    ) -> Tensor:
        """Step packed rows along their paths and keep what later rounds need."""
        ...

    def fold(self, cache: DeltaRuleCache, rows: StateRows) -> None:
        """Fold pending paths into the states."""
        ...


class SelectiveStateKernel(SpecKernel, Protocol):
    """What `mamba:mamba2@*/verify` kernels are called with; see `selective_state`."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        cache: SelectiveStateCache,
        rows: StateRows,
    ) -> Tensor:
        """Step packed rows along their paths and keep what later rounds need."""
        ...

    def fold(self, cache: SelectiveStateCache, rows: StateRows) -> None:
        """Fold pending paths into the states."""
        ...


class StateCommitKernel(SpecKernel, Protocol):
    """What `layout:mamba_state@*/commit` kernels are called with, once per round; see `commit_states`."""

    def __call__(self, tables: StateTables, req_idx: Tensor, result: AcceptResult) -> None:
        """Make the state of each path's last row the committed one, windows included."""
        ...


class _TreeKernel:
    """Verifies trees of any layer without unknown features."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        """`"tree"`, or `"chain"` for features that the built-in kernels do not know."""
        if layer.features:
            return SpecLimit("chain", f"features {sorted(layer.features)} are unknown to the built-in state kernels")
        return _TREES_ONLY

    def bind(self, resources: SpecResources) -> None:
        """Nothing to prepare."""


class ReferenceConv(_TreeKernel):
    """Tree causal convolution in plain torch."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, cache: ConvCache, rows: StateRows) -> Tensor:
        """Convolve packed rows along their paths and keep what later rounds need."""
        return causal_conv(x, weight, bias, cache, rows)

    def fold(self, cache: ConvCache, rows: StateRows) -> None:
        """Fold pending paths into the windows."""
        fold_window(cache, rows)


class ReferenceDeltaRule(_TreeKernel):
    """Gated delta rule in decode order, in plain torch."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        cache: DeltaRuleCache,
        rows: StateRows,
    ) -> Tensor:
        """Step packed rows along their paths and keep what later rounds need."""
        return gated_delta_rule(query, key, value, log_decay, beta, cache, rows)

    def fold(self, cache: DeltaRuleCache, rows: StateRows) -> None:
        """Fold pending paths into the states."""
        fold_delta_rule(cache, rows)


class ReferenceSelectiveState(_TreeKernel):
    """Mamba2's state in decode order, in plain torch."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        cache: SelectiveStateCache,
        rows: StateRows,
    ) -> Tensor:
        """Step packed rows along their paths and keep what later rounds need."""
        return selective_state(x, dt, a, b, c, d, cache, rows)

    def fold(self, cache: SelectiveStateCache, rows: StateRows) -> None:
        """Fold pending paths into the states."""
        fold_selective_state(cache, rows)


class ReferenceStateCommit(_TreeKernel):
    """State commit in plain torch: one operation on tables for all layers."""

    def __call__(self, tables: StateTables, req_idx: Tensor, result: AcceptResult) -> None:
        """Make the state of each path's last row the committed one, windows included."""
        commit_states(tables, req_idx, result)


def state_kernels() -> dict[str, SpecKernel]:
    """The built-in kernels by key, in both modes."""
    kernels: dict[str, SpecKernel] = {}
    rule, selective, conv, commit = (
        ReferenceDeltaRule(),
        ReferenceSelectiveState(),
        ReferenceConv(),
        ReferenceStateCommit(),
    )
    for mode in ("slots", "replay"):
        kernels[f"mamba:gdn@{mode}/verify"] = kernels[f"mamba:kda@{mode}/verify"] = rule
        kernels[f"mamba:mamba2@{mode}/verify"] = selective
        kernels[f"conv:short@{mode}/verify"] = conv
        kernels[f"layout:mamba_state@{mode}/commit"] = commit
    return kernels
