"""Rotary embeddings of our own, for the kinds in which transformers lets one request change another's.

transformers chooses the frequencies of the `dynamic` and `longrope` kinds once per forward, from the largest position
in it: a long request in a batch changes what a short one computes, and reading the position waits for the device. Here
each row chooses by its own position p, as if its request were decoded alone, one token at a time:

- `longrope`: the short factors where p + 1 <= `original_max_position_embeddings`, the long ones past it.
- `dynamic`: the frequencies of a sequence of p + 1 tokens, which are the unscaled ones up to `max_position_embeddings`.

So a row's result depends on nothing but its request's tokens: batches, chunks, trees and speculation cannot change it.
Requests that stay within the original length get exactly what transformers computes for them. Past it, keys keep the
rotation they were written with, as in transformers' decoding with a cache, so that such a request mixes rotations.
`generate` of some models avoids that: it rotates a long prompt with the long factors from its first token and computes
the cache again when a request first grows past the original length. This is not done here: such requests differ.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from specround.contract.errors import ModelError
from specround.models.family import Family

HF_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
"""Kinds whose tables depend on the configuration alone: transformers' own modules are used."""
OWN_ROPE_TYPES: Final = ("dynamic", "longrope")
"""Kinds computed here."""


def check_rope(family: Family, config: Any, source: str) -> None:
    """Refuse a kind of rotary embedding that would mix requests.

    Raises:
        ModelError: Names the kind and what is allowed.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = list(parameters.values()) if family.rope_by_layer_type else [parameters]
    allowed = list(HF_ROPE_TYPES)
    if family.rotary_halves and not family.rope_by_layer_type:
        allowed += OWN_ROPE_TYPES
    for one in sets:
        kind = one.get("rope_type", "default") if isinstance(one, dict) else None
        if kind not in allowed:
            raise ModelError("rope_type", kind, f"one of {allowed} (model {source!r})")


def own_rotary(family: Family, config: Any) -> nn.Module | None:
    """The module that replaces transformers' rotary embedding; None where that one is right."""
    parameters = getattr(config, "rope_parameters", None)
    if family.rope_by_layer_type or not parameters:
        return None
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        return LongRope(config)
    return DynamicRope(config) if kind == "dynamic" else None


class _RowRotary(nn.Module):
    """A rotary embedding whose frequencies are chosen row by row.

    Args:
        scaling: Multiplies cosines and sines.
    """

    def __init__(self, scaling: float) -> None:
        super().__init__()
        self.attention_scaling = scaling

    def frequencies(self, positions: Tensor) -> Tensor:
        """Inverse frequencies `[B, T, D / 2]` float32 of rows at these positions `[B, T]`."""
        raise NotImplementedError

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines.

        Args:
            x: Gives the type of the results.
            position_ids: `[B, T]` int64.

        Returns:
            Two tensors `[B, T, D]`, the angles repeated as two halves.
        """
        angles = position_ids[..., None].float() * self.frequencies(position_ids)
        both = torch.cat([angles, angles], -1)
        return (both.cos() * self.attention_scaling).to(x.dtype), (both.sin() * self.attention_scaling).to(x.dtype)


class LongRope(_RowRotary):
    """Short factors up to the original length, long ones past it (LongRoPE, arXiv 2402.13753).

    Args:
        config: With `rope_parameters` of the kind "longrope".
    """

    short: Tensor
    long: Tensor

    def __init__(self, config: Any) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        self.original_length = int(config.rope_parameters["original_max_position_embeddings"])
        short, scaling = ROPE_INIT_FUNCTIONS["longrope"](config)
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=self.original_length + 1)
        super().__init__(float(scaling))
        self.register_buffer("short", short, persistent=False)
        self.register_buffer("long", long, persistent=False)

    def frequencies(self, positions: Tensor) -> Tensor:
        """See the base class."""
        return torch.where(positions[..., None] < self.original_length, self.short, self.long)


class DynamicRope(_RowRotary):
    """NTK-aware scaling that grows with the position past the model's own length.

    Args:
        config: With `rope_parameters` of the kind "dynamic".
    """

    unscaled: Tensor
    exponents: Tensor

    def __init__(self, config: Any) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = config.rope_parameters
        self.length, self.factor = int(config.max_position_embeddings), float(parameters["factor"])
        self.theta = float(parameters["rope_theta"])
        unscaled, scaling = ROPE_INIT_FUNCTIONS["dynamic"](config)
        super().__init__(float(scaling))
        dim = 2 * unscaled.shape[0]
        self.register_buffer("unscaled", unscaled, persistent=False)
        self.register_buffer("exponents", torch.arange(0, dim, 2).float() / dim, persistent=False)

    def frequencies(self, positions: Tensor) -> Tensor:
        """See the base class."""
        dim = 2 * self.exponents.shape[0]
        tokens = (positions + 1).clamp(min=self.length)
        base = self.theta * (self.factor * tokens / self.length - (self.factor - 1)) ** (dim / (dim - 2))
        grown = 1.0 / base[..., None] ** self.exponents
        return torch.where(positions[..., None] < self.length, self.unscaled, grown)
