"""Where stored tensors go: checkpoints keep each expert's projections apart, modules keep all experts in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from specround.contract.errors import ModelError
from specround.models.families import Family

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # recomputed from the config; old checkpoints store it per layer
_MOST_NAMED = 20


@dataclass(frozen=True)
class Placement:
    """A tensor of the module, or a part of it.

    Attributes:
        name: The module's tensor.
        expert: Index of the expert the stored tensor belongs to; None = the whole tensor.
        half: 0 = the gate's rows, 1 = the up projection's, None = all rows of the expert.
    """

    name: str
    expert: int | None = None
    half: int | None = None

    def part(self, whole: Tensor) -> Tensor:
        """The view of the module's tensor that the stored one fills."""
        if self.expert is None:
            return whole
        rows = whole[self.expert]
        return rows if self.half is None else rows.chunk(2, 0)[self.half]


class Placements:
    """Stored names to places in a module.

    Args:
        family: Entry of the table.
        config: The model's configuration.
        shared: Other name -> first name, of parameters that the config ties together.
    """

    def __init__(self, family: Family, config: Any, shared: Mapping[str, str]) -> None:
        self._shared = shared
        self._block = family.expert_block
        self._projections = dict(zip(family.experts or (), range(3), strict=False))
        names = "|".join(map(re.escape, self._projections))
        self._expert = re.compile(rf"(.+\.){family.expert_block}\.experts\.(\d{{1,5}})\.({names})\.weight", re.ASCII)
        self._first_extra = int(config.num_hidden_layers)
        self._num_extra = int(getattr(config, "num_nextn_predict_layers", None) or 0)

    def of(self, stored: str) -> Placement | None:
        """Where a stored tensor goes; None = nowhere, it is not needed."""
        if stored.endswith(_IGNORED_SUFFIXES) or self._is_extra_layer(stored):
            return None
        match = self._expert.fullmatch(stored) if self._projections else None
        if match is None:
            name = stored.replace(f".{self._block}.", ".mlp.") if self._block != "mlp" else stored
            return Placement(self._shared.get(name, name))
        kind = self._projections[match[3]]
        name = f"{match[1]}mlp.experts.{'down_proj' if kind == 2 else 'gate_up_proj'}"
        return Placement(name, int(match[2]), None if kind == 2 else kind)

    def missing_names(self, name: str, whole: Tensor, found: Iterable[Placement]) -> list[str]:
        """What is still missing of one of the module's tensors, by stored name; the first 20.

        Args:
            name: The module's tensor.
            whole: It, on any device.
            found: Places of this tensor that the checkpoint fills.
        """
        held = set(found)
        if not held or any(place.expert is None for place in held):
            return [] if held else [name]
        halves: tuple[int | None, ...] = (None,) if name.endswith("down_proj") else (0, 1)
        every = ((i, half) for i in range(whole.shape[0]) for half in halves)
        missing = islice((pair for pair in every if Placement(name, *pair) not in held), _MOST_NAMED)
        base = name.rpartition(".")[0].replace(".mlp.", f".{self._block}.")
        names = {kind: projection for projection, kind in self._projections.items()}
        return [f"{base}.{i}.{names[2 if half is None else half]}.weight" for i, half in missing]

    def _is_extra_layer(self, stored: str) -> bool:
        """A multi-token prediction module, which checkpoints keep as layers after the last."""
        match = re.match(r"model\.layers\.(\d{1,5})\.", stored, re.ASCII)
        return match is not None and 0 <= int(match[1]) - self._first_extra < self._num_extra


def check_weights(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], placements: Placements, source: str, kind: str
) -> None:
    """Check that stored tensors and a module's tensors are exactly the same set, by name.

    Args:
        tensors: The module's tensors by first name, on the meta device.
        shapes: Stored shapes.
        placements: Where they go.
        source: Name of the model, for messages.
        kind: Its model type, for messages.

    Raises:
        ModelError: A weight is missing or unexpected.
    """
    found: dict[str, list[Placement]] = {}
    unexpected = []
    for stored in shapes:
        place = placements.of(stored)
        if place is None:
            continue
        if place.name not in tensors or (place.expert or 0) >= max(1, *tensors[place.name].shape[:1]):
            unexpected.append(stored)
        else:
            found.setdefault(place.name, []).append(place)
    missing = [
        part for name, whole in tensors.items() for part in placements.missing_names(name, whole, found.get(name, ()))
    ]
    if missing:
        raise ModelError("weights", missing[:_MOST_NAMED], f"stored in the checkpoint of {source!r}: they are missing")
    if unexpected:
        raise ModelError(
            "weights", unexpected[:_MOST_NAMED], f"absent: a {kind} model of this config does not use them"
        )
    twice = [name for name, places in found.items() if len({p.expert is None for p in places}) > 1]
    if twice:
        raise ModelError("weights", twice[:_MOST_NAMED], "stored whole or expert by expert, not both")
