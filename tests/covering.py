"""Covering arrays: few combinations of settings in which every pair of values of two settings occurs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

Axes = Mapping[str, tuple[Any, ...]]
"""Values of each setting."""


def full_product(axes: Axes) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def covering_array(axes: Axes) -> list[dict[str, Any]]:
    """Combinations in which every pair of values of two axes occurs: greedy, best of a few random candidates."""
    source = random.Random(0)
    open_pairs = set(pairs_of(axes))
    chosen = []
    while open_pairs:
        seeded = []
        for first in source.sample(sorted(open_pairs, key=str), min(12, len(open_pairs))):
            values = {name: source.choice(choices) for name, choices in axes.items()} | dict(first)
            seeded.append((len(open_pairs & set(pairs_in(values))), len(seeded), values))
        values = max(seeded)[2]
        open_pairs -= set(pairs_in(values))
        chosen.append(values)
    return chosen


def pairs_of(axes: Axes) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Every pair of values of two axes."""
    for one, two in combinations(axes, 2):
        for a, b in product(axes[one], axes[two]):
            yield ((one, a), (two, b))


def pairs_in(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The pairs one combination covers."""
    return combinations(values.items(), 2)
