"""`Mixer`: what stands in for the forward of a recurrent Hugging Face module, and the rule for what it verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from torch import Tensor

from specround.contract import SpecLimit
from specround.models.recurrent.layer import StateShape

TREES = SpecLimit("tree", "a recurrent state folds every ancestor in and cannot hide one")
"""Limit of a mixer whose states branch."""


class StateOps(Protocol):
    """What a mixer calls; a `RecurrentLayer`, or a recording of it while a model is probed."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal convolution of `[N, D]`."""
        ...

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Gated delta rule; `[N, Hv, Dv]`."""
        ...

    def selective_state(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        """State space with a decay per head; `[N, H, P]`."""
        ...

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """State space with a decay per channel and state; `[N, E]`."""
        ...


class Mixer(ABC):
    """One recurrent module's forward over packed rows.

    A subclass says in its own body which modules it replaces and what it verifies. Both are claims about its own maths,
    so neither is inherited: a subclass that says nothing replaces nothing, and verifies chains only.

    Args:
        module: The Hugging Face module, whose weights are used in place.
    """

    replaces: ClassVar[tuple[str, ...]] = ()
    """Names of the Hugging Face classes."""
    verifies: ClassVar[SpecLimit]
    """The highest plan kind, and why not more."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.ops: StateOps

    @property
    @abstractmethod
    def shape(self) -> StateShape:
        """What the layer stores."""

    @abstractmethod
    def mix(self, x: Tensor) -> Tensor:
        """`[N, H]` to `[N, H]`, both of the module's type."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The module's forward: `[1, N, H]` to `[1, N, H]`. Caches and masks of transformers are not looked at."""
        return self.mix(hidden_states[0])[None]


def declared_limit(mixer: type[Mixer]) -> SpecLimit:
    """What a mixer class verifies, by its own declaration.

    Args:
        mixer: The class.

    Returns:
        Its `verifies`, or `"chain"` if only a class that it inherits from has one.
    """
    own = vars(mixer).get("verifies")
    if isinstance(own, SpecLimit):
        return own
    return SpecLimit("chain", f"{mixer.__name__} declares no plan kind of its own: a declaration is not inherited")


class RecordedOps:
    """Stands in for a layer without caches: gives zeros and keeps which op was called with which sizes.

    Args:
        shape: What the layer will store.
    """

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    @property
    def expected(self) -> list[tuple[str, tuple[int, ...]]]:
        """The calls of one forward, with the sizes that caches are allocated for."""
        shape = self.shape
        state = (shape.num_heads, shape.num_key_heads, shape.key_dim, shape.value_dim)
        calls: list[tuple[str, tuple[int, ...]]] = [("convolution", (shape.conv_channels, shape.conv_width))]
        return calls if shape.op == "none" else [*calls, (shape.op, state)]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `StateOps`."""
        self.calls.append(("convolution", (x.shape[1], weight.shape[1])))
        return x.new_zeros(x.shape)

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """See `StateOps`."""
        op = "gdn" if log_decay.ndim == beta.ndim else "kda"
        self.calls.append((op, (value.shape[1], key.shape[1], key.shape[2], value.shape[2])))
        return value.new_zeros(value.shape).float()

    def selective_state(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        """See `StateOps`."""
        self.calls.append(("mamba2", (x.shape[1], b.shape[1], b.shape[2], x.shape[2])))
        return x.new_zeros(x.shape).float()

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """See `StateOps`."""
        self.calls.append(("mamba1", (x.shape[1], 1, b.shape[1], 1)))
        return x.new_zeros(x.shape).float()
