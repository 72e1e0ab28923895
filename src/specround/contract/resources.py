"""`SpecResources`: what a speculator's rounds hold, declared once at start-up, and how it is lowered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specround.contract.errors import ConfigError
from specround.contract.plan import MAX_TREE_COLUMNS, PLAN_KINDS, PlanKind

HiddenStates = Literal["none", "last"] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """One KV layer that a draft module needs in the engine's paged pool.

    Attributes:
        name: Unique name, used with `DraftHost.attend`.
        num_kv_heads: Key/value heads, >= 1.
        head_dim: Elements per head, >= 1.
        window: Sliding window in tokens, or None for full attention.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        for field in ("num_kv_heads", "head_dim"):
            if not _is_int(getattr(self, field), 1):
                raise ConfigError(f"draft layer {self.name!r}.{field}", getattr(self, field), "an integer >= 1")
        if self.window is not None and not _is_int(self.window, 1):
            raise ConfigError(f"draft layer {self.name!r}.window", self.window, "an integer >= 1 or None")


@dataclass(frozen=True, kw_only=True)
class SpecResources:
    """What speculation may hold. *Declared* sizes memory; *effective* is what is left after lowering.

    Attributes:
        max_candidates: Root + drafts per request and round (K + 1), >= 1.
        max_branching: Children per row; > 1 declares trees.
        custom_mask: Plans may carry masks or explicit positions.
        max_depth: Deepest row, root = 0; None means `max_candidates - 1`.
        candidate_shapes: Candidates-per-request lengths that get a decode graph of their own. Any length up to
            `max_candidates` is legal with or without a graph.
        hidden_states: `"none"`, `"last"`, or a tuple of target layer indices whose outputs the drafter reads.
        drafting: `"device"`, or `"host"` for a drafter that needs each step's committed tokens on the host.
        draft_layers: KV layers of the drafter's own modules. Models loaded through `DraftHost.load_model` add theirs.

    Raises:
        ConfigError: A field is out of range.

    Example:
        >>> SpecResources(max_candidates=8, max_branching=2).kind
        'tree'
    """

    max_candidates: int
    max_branching: int = 1
    custom_mask: bool = False
    max_depth: int | None = None
    candidate_shapes: tuple[int, ...] = ()
    hidden_states: HiddenStates = "none"
    drafting: Literal["device", "host"] = "device"
    draft_layers: tuple[DraftLayer, ...] = ()

    def __post_init__(self) -> None:
        for field in ("max_candidates", "max_branching"):
            if not _is_int(getattr(self, field), 1):
                raise ConfigError(field, getattr(self, field), "an integer >= 1")
        if self.kind != "chain" and self.max_candidates > MAX_TREE_COLUMNS:
            raise ConfigError("max_candidates", self.max_candidates, f"at most {MAX_TREE_COLUMNS} for trees and masks")
        if self.max_depth is not None and not _is_int(self.max_depth, 0, self.max_candidates - 1):
            raise ConfigError("max_depth", self.max_depth, f"0 to max_candidates - 1 = {self.max_candidates - 1}")
        shapes = self.candidate_shapes
        if not isinstance(shapes, tuple) or not all(_is_int(shape, 1, self.max_candidates) for shape in shapes):
            raise ConfigError("candidate_shapes", shapes, f"a tuple of integers of 1 to {self.max_candidates}")
        if self.drafting not in ("device", "host"):
            raise ConfigError("drafting", self.drafting, "'device' or 'host'")
        layers = self.hidden_states
        indices = isinstance(layers, tuple) and layers != () and all(_is_int(layer, 0) for layer in layers)
        if layers not in ("none", "last") and not indices:
            raise ConfigError("hidden_states", layers, "'none', 'last' or a tuple of layer indices >= 0")
        names = [layer.name for layer in self.draft_layers]
        if len(set(names)) < len(names):
            raise ConfigError("draft_layers", names, "layers with unique names")

    @property
    def kind(self) -> PlanKind:
        """The highest plan kind these resources allow."""
        if self.custom_mask:
            return "mask"
        return "tree" if self.max_branching > 1 else "chain"

    @property
    def depth_limit(self) -> int:
        """The deepest row allowed, root = 0."""
        return self.max_candidates - 1 if self.max_depth is None else self.max_depth

    def lowered(self, kind: PlanKind) -> SpecResources:
        """These resources at a lower plan kind: a mask as a tree, a tree as a chain of the same length.

        Args:
            kind: `"chain"`, `"tree"` or `"mask"`. A kind at or above the present one changes nothing.

        Raises:
            ConfigError: `kind` is unknown, or `"none"`: without any verification there is nothing to lower to.

        Example:
            >>> SpecResources(max_candidates=8, max_branching=2).lowered("chain").max_branching
            1
        """
        if kind not in PLAN_KINDS[1:]:
            raise ConfigError("plan kind", kind, "'chain', 'tree' or 'mask'")
        if PLAN_KINDS.index(kind) >= PLAN_KINDS.index(self.kind):
            return self
        if kind == "tree":
            return replace(self, custom_mask=False)
        return replace(self, custom_mask=False, max_branching=1, max_depth=None)


def _is_int(value: object, low: int, high: int | None = None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return low <= value and (high is None or value <= high)
