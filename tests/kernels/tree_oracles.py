"""Trees for the kernel tests: hypothesis strategies, and what a tree means in plain Python loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

MAX_COLUMNS = 64
SHAPES = ("random", "chain", "star", "binary", "deep")


def property_settings(max_examples: int) -> settings:
    """The same examples on every run, and no time limit per example: the machine may be shared."""
    return settings(max_examples=max_examples, deadline=None, derandomize=True, database=None)


def parent_of(shape: str, column: int, raw: int) -> int:
    """Parent of a column > 0 in a tree of a given shape."""
    if shape == "chain":
        return column - 1
    if shape == "star":
        return 0
    if shape == "binary":
        return (column - 1) // 2
    if shape == "deep":
        return column - 1 - raw % min(3, column)
    return raw % column


@st.composite
def trees(draw: st.DrawFn, max_columns: int = MAX_COLUMNS, columns: int | None = None) -> list[int]:
    """Parents of a tree with 1 to `max_columns` columns (or exactly `columns`)."""
    size = draw(st.integers(1, max_columns)) if columns is None else columns
    shape = draw(st.sampled_from(SHAPES))
    raw = draw(st.lists(st.integers(0, 2**16), min_size=size - 1, max_size=size - 1))
    return [-1] + [parent_of(shape, column, raw[column - 1]) for column in range(1, size)]


@dataclass
class Forest:
    """Trees of several requests in C columns; request r uses columns `0 .. used[r] - 1`."""

    parents: list[list[int]]
    used: list[int]

    @property
    def tensor(self) -> Tensor:
        """`[R, C]` int32."""
        return torch.tensor(self.parents, dtype=torch.int32)


@st.composite
def forests(draw: st.DrawFn, max_columns: int = MAX_COLUMNS, garbage: bool = False) -> Forest:
    """1 to 4 ragged trees; unused columns hold -1, or anything if `garbage`."""
    columns = draw(st.integers(1, max_columns))
    parents, used = [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.one_of(st.just(columns), st.integers(0, columns)))
        tree = draw(trees(columns=count)) if count else []
        unused = st.integers(-3, 2 * columns) if garbage else st.just(-1)
        rest = draw(st.lists(unused, min_size=columns - count, max_size=columns - count))
        parents.append(tree + rest)
        used.append(count)
    return Forest(parents, used)


def depth_of(parents: list[int], column: int) -> int:
    """Edges between a column and its root."""
    depth = 0
    while parents[column] >= 0:
        column = parents[column]
        depth += 1
    return depth


def ancestors_of(parents: list[int], column: int) -> set[int]:
    """A column and its ancestors."""
    found = {column}
    while parents[column] >= 0:
        column = parents[column]
        found.add(column)
    return found


def path_to(parents: list[int], column: int) -> list[int]:
    """Columns from the root to a column."""
    return sorted(ancestors_of(parents, column))


def bit_set(value: int) -> set[int]:
    """Columns of a signed 64-bit integer."""
    unsigned = value % 2**64
    return {column for column in range(64) if unsigned >> column & 1}


def as_int64(columns: set[int]) -> int:
    """The signed 64-bit integer with these bits."""
    unsigned = sum(1 << column for column in columns)
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def probe_case(forest: Forest, seed: int, with_positions: bool) -> tuple[list[list[set[int]]], list[list[int]] | None]:
    """What each row sees and where it sits: mostly what a committable row would, sometimes not."""
    rng = random.Random(seed)
    visible: list[list[set[int]]] = []
    positions: list[list[int]] = []
    for parents, used in zip(forest.parents, forest.used, strict=True):
        seen = [ancestors_of(parents, c) if c < used else {c} for c in range(len(parents))]
        for column in range(1, used):
            if rng.random() < 0.15:
                seen[column] = seen[column] ^ {rng.randrange(column)}
        visible.append(seen)
        exact = [depth_of(parents, c) if c < used else 0 for c in range(len(parents))]
        positions.append([place + (c > 0 and rng.random() < 0.1) for c, place in enumerate(exact)])
    return visible, positions if with_positions else None
