"""Where stored tensors go: checkpoints keep apart, or name otherwise, what modules keep in one tensor."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from specround.contract.errors import ModelError
from specround.models.family import Family

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # recomputed from the config; old checkpoints store it per layer
_MOST_NAMED = 20


@dataclass(frozen=True)
class Placement:
    """A tensor of the module, or a part of it.

    Attributes:
        name: The module's tensor.
        expert: Index of the expert the stored tensor belongs to; None = the whole tensor.
        half: 0 = the gate's rows, 1 = the up projection's, None = all rows of the expert.
        section: Place among the stored tensors that follow each other in this one, its first row, and one past its
            last; None = all rows.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    section: tuple[int, int, int | None] | None = None

    @property
    def is_part(self) -> bool:
        """Whether other stored tensors fill the rest."""
        return self.expert is not None or self.section is not None

    def part(self, whole: Tensor) -> Tensor:
        """The view of the module's tensor that the stored one fills."""
        if self.section is not None:
            return whole[self.section[1] : self.section[2]]
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
        shapes: Stored shapes.
        names: The module's tensors.
    """

    def __init__(
        self,
        family: Family,
        config: Any,
        shared: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        names: Container[str],
    ) -> None:
        self._family, self._shared, self._shapes, self._names = family, shared, shapes, names
        self._block, self._own_block = family.expert_block, family.module_block
        self._projections = {name: kind for kind, name in enumerate(family.experts or ()) if name}
        projections = "|".join(map(re.escape, self._projections))
        self._expert = re.compile(
            rf"(.+\.){family.expert_block}\.experts\.(\d{{1,5}})\.({projections})\.weight", re.ASCII
        )
        self._first_extra = int(config.num_hidden_layers)
        self._num_extra = int(getattr(config, "num_nextn_predict_layers", None) or 0)

    def of(self, stored: str) -> Placement | None:
        """Where a stored tensor goes; None = nowhere, it is not needed."""
        if stored.endswith(_IGNORED_SUFFIXES) or self._is_extra_layer(stored):
            return None
        if any(re.match(pattern, stored) for pattern, _ in self._family.skipped):
            return None
        name = stored
        for pattern, replacement in self._family.renamed:
            name = re.sub(pattern, replacement, name, flags=re.ASCII)
        match = self._expert.fullmatch(name) if self._projections else None
        if match is None:
            name = name.replace(f".{self._block}.", f".{self._own_block}.")
            return self._section_of(stored, name) or Placement(self._shared.get(name, name))
        kind = self._projections[match[3]]
        base = f"{match[1]}{self._own_block}.experts."
        if kind == 2 or not self._has_gate:
            return Placement(f"{base}{'down_proj' if kind == 2 else 'up_proj'}", int(match[2]))
        return Placement(f"{base}gate_up_proj", int(match[2]), kind)

    def missing_names(self, name: str, whole: Tensor, found: Iterable[Placement]) -> list[str]:
        """What is still missing of one of the module's tensors, by stored name; the first 20.

        Args:
            name: The module's tensor.
            whole: It, on any device.
            found: Places of this tensor that the checkpoint fills.
        """
        held = set(found)
        if not held or any(not place.is_part for place in held):
            return [] if held else [name]
        sections = {place.section[0] for place in held if place.section is not None}
        if sections:
            base, parts = next(
                (name.removesuffix(end), parts) for end, parts in self._family.merged if name.endswith(end)
            )
            return [base + part for i, part in enumerate(parts) if i not in sections]
        halves: tuple[int | None, ...] = (0, 1) if name.endswith("gate_up_proj") else (None,)
        every = ((i, half) for i in range(whole.shape[0]) for half in halves)
        missing = islice((pair for pair in every if Placement(name, *pair) not in held), _MOST_NAMED)
        base = name.rpartition(".")[0].replace(f".{self._own_block}.", f".{self._block}.")
        names = {kind: projection for projection, kind in self._projections.items()}
        only = 2 if name.endswith("down_proj") else 1
        return [f"{base}.{i}.{names[only if half is None else half]}.weight" for i, half in missing]

    @property
    def _has_gate(self) -> bool:
        return 0 in self._projections.values()

    def _section_of(self, stored: str, name: str) -> Placement | None:
        """A stored tensor that is some rows of a module's one."""
        if name in self._names:
            return None
        for whole, parts in self._family.merged:
            for index, part in enumerate(parts):
                if name.endswith(part):
                    first = sum(self._stored_rows(stored.removesuffix(part) + other) for other in parts[:index])
                    last = None if index == len(parts) - 1 else first + self._stored_rows(stored)
                    return Placement(name.removesuffix(part) + whole, section=(index, first, last))
        return None

    def _stored_rows(self, stored: str) -> int:
        shape = self._shapes.get(stored)
        return shape[0] if shape else 0

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
    twice = [name for name, places in found.items() if len({place.is_part for place in places}) > 1]
    if twice:
        raise ModelError("weights", twice[:_MOST_NAMED], "stored whole or in parts, not both")
