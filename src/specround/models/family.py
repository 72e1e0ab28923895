"""`Family`: what one Hugging Face model type needs besides the attention hook and the mixers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from specround.contract.errors import ModelError
from specround.contract.plan import PlanKind

Windows = Literal["none", "every layer", "layer types"]
"""Which layers of a family have `config.sliding_window`."""

_SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV, HYBRID = "linear_attention", "conv", "hybrid"

_CONTENTS: Final[dict[str, tuple[bool, bool]]] = {
    FULL: (True, False),
    LINEAR: (False, True),
    CONV: (False, True),
    HYBRID: (True, True),
    "mlp": (False, False),
    "moe": (False, False),
}
"""Block types of transformers' configurations: whether such a block has attention, and a recurrent module."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one decoder block contains.

    Attributes:
        attention: It calls the hook.
        recurrent: It calls a mixer.
        window: Sliding window of its attention, None = full attention.
    """

    attention: bool
    recurrent: bool
    window: int | None = None


def plain(config: Any, logits: Tensor) -> Tensor:
    """The language model head's output as it is."""
    return logits


def softcapped(config: Any, logits: Tensor) -> Tensor:
    """`cap * tanh(logits / cap)`, where the config sets `final_logit_softcapping`."""
    cap: float | None = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


def multiplied(config: Any, logits: Tensor) -> Tensor:
    """Times `logit_scale`."""
    scale: float = config.logit_scale
    return logits * scale


def divided(config: Any, logits: Tensor) -> Tensor:
    """Divided by `logits_scaling`."""
    scale: float = config.logits_scaling
    return logits / scale


def head_multiplied(config: Any, logits: Tensor) -> Tensor:
    """Times `lm_head_multiplier`."""
    scale: float = config.lm_head_multiplier
    return logits * scale


def any_module(module: Any) -> None:
    """Accept every module."""


def adapters_in_order(module: Any) -> None:
    """Refuse a version of transformers that counts all layers, not those with adapters, to choose one.

    Raises:
        ModelError: The adapters are not those that checkpoints were trained with.
    """
    shared = [block.shared_transformer for block in module.base_model.layers if hasattr(block, "shared_transformer")]
    found, count = [block.block_id for block in shared], int(module.config.num_mem_blocks)
    expected = [place % count for place in range(len(shared))]
    if found != expected:
        raise ModelError("num_mem_blocks", count, f"1 with this version of transformers: its adapters are {found}")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type.

    Attributes:
        config_class: Its configuration class in transformers.
        model_class: Its causal language model in transformers.
        windows: Which layers have a sliding window.
        window_in_mask_only: The module does not tell the hook about the window.
        has_sinks: Every layer has attention sinks.
        softcap: Config attribute with the soft cap of the scores, or None.
        final_logits: Config and the head's output to the model's logits.
        block_types: Block types that the configuration may name, for types with recurrent blocks.
        verifies: The highest plan kind; for types with recurrent blocks, what their mixers declare.
        experts: How the projections of one expert are called in checkpoints, as (gate, up, down), with an empty name
            where experts have no gate; None = no experts.
        expert_block: Name of the expert block in checkpoints.
        module_block: The module's name of it.
        renamed: Patterns of names in checkpoints, with what stands in the module's names in their place.
        merged: Ends of names of the module's tensors, with the ends of the stored tensors whose rows follow each other
            in them.
        skipped: Patterns of stored names that are not loaded, with the reason.
        rope_by_layer_type: The rotary embedding has one set of parameters for each layer type.
        rotary_halves: The rotary embedding gives angles repeated as two halves, in the type of the activations, so that
            ours can stand in.
        check_module: Refuses what the installed transformers builds wrongly.
        refused: Config attributes with the reason why a true value is refused.
        original_code: Values of `auto_map` that name the code this type was first published with, which transformers'
            own class replaces. Any other is refused.
    """

    config_class: str
    model_class: str
    windows: Windows = "none"
    window_in_mask_only: bool = False
    has_sinks: bool = False
    softcap: str | None = None
    final_logits: Callable[[Any, Tensor], Tensor] = plain
    block_types: tuple[str, ...] = ()
    verifies: PlanKind = "mask"
    experts: tuple[str, str, str] | None = None
    expert_block: str = "mlp"
    module_block: str = "mlp"
    renamed: tuple[tuple[str, str], ...] = ()
    merged: tuple[tuple[str, tuple[str, ...]], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    rope_by_layer_type: bool = False
    rotary_halves: bool = True
    check_module: Callable[[Any], None] = any_module
    refused: tuple[tuple[str, str], ...] = ()
    original_code: tuple[str, ...] = ()

    @property
    def recurrent(self) -> bool:
        """Whether any block may have a recurrent module."""
        return any(_CONTENTS[kind][1] for kind in self.block_types)

    @property
    def has_attention(self) -> bool:
        """Whether any block may have attention."""
        return not self.block_types or any(_CONTENTS[kind][0] for kind in self.block_types)

    def blocks(self, config: Any) -> tuple[Block, ...]:
        """What each decoder block contains, as the configuration says.

        Raises:
            ModelError: Layer types that this family does not have, or no usable window.
        """
        if not self.block_types:
            return tuple(Block(attention=True, recurrent=False, window=w) for w in self.layer_windows(config))
        count, types = int(config.num_hidden_layers), list(config.layer_types)
        if len(types) != count or set(types) - set(self.block_types):
            allowed = f"{count} of {list(self.block_types)}: others are not computed for {config.model_type!r}"
            raise ModelError("layer_types", types, allowed)
        return tuple(Block(attention=_CONTENTS[kind][0], recurrent=_CONTENTS[kind][1]) for kind in types)

    def layer_windows(self, config: Any) -> tuple[int | None, ...]:
        """The sliding window of each layer, None = full attention, as transformers' own masks apply it.

        Raises:
            ModelError: Layer types that this family's masks do not have or that contradict it, or no usable window.
        """
        count = int(config.num_hidden_layers)
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        types = [FULL] * count if named is None else list(named)
        if self.windows == "every layer" and window is not None:
            types = [_SLIDING] * count
        expected = [FULL] * count if self.windows == "none" else types
        if len(types) != count or set(types) - {_SLIDING, FULL} or (named is not None and list(named) != expected):
            allowed = (
                f"{count} of {_SLIDING!r} and {FULL!r}" if self.windows == "layer types" else f"absent or {expected}"
            )
            raise ModelError("layer_types", named, f"{allowed}: others are not computed for {config.model_type!r}")
        if _SLIDING in types and (type(window) is not int or window < 1):
            raise ModelError("sliding_window", window, f"at least 1: layer_types of {config.model_type!r} use it")
        return tuple(window if kind == _SLIDING else None for kind in types)

    def layer_softcap(self, config: Any) -> float | None:
        """Soft cap of the scores, or None."""
        return None if self.softcap is None else getattr(config, self.softcap)

    def check(self, config: Any) -> None:
        """Refuse a configuration this family's hook does not cover.

        Raises:
            ModelError: Names the setting and the reason.
        """
        for name, reason in self.refused:
            if getattr(config, name, None):
                raise ModelError(name, getattr(config, name), f"unset: {reason}")
        self.blocks(config)
