"""Shuffled block tables and moves of paths, and what a commit of them should leave, by a loop."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specround.kernels.kv_cache.naive import slots_of

BLOCK = 4


def shuffled_tables(lengths: list[int], rng: random.Random) -> tuple[Tensor, int]:
    """Block tables of requests with `lengths` tokens, stale ids after each row's end, and the number of blocks."""
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = list(range(1, sum(counts) + 2))
    rng.shuffle(blocks)
    stale, width = blocks.pop(), max([*counts, 1])
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    return torch.tensor([table + [stale] * (width - len(table)) for table in tables]), sum(counts) + 2


def moves_of(paths: list[list[int]], roots: list[int], tables: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Source and target slots of a batch of paths: column `path[i]` goes to chain place i."""
    padded = torch.tensor([path + [-1] * (columns - len(path)) for path in paths])
    place, root = torch.arange(columns).expand_as(padded), torch.tensor(roots)[:, None]
    moves = (padded >= 0) & (padded != place)
    source = slots_of(tables, root + padded, BLOCK, moves)
    return source.flatten(), slots_of(tables, root + place, BLOCK, moves).flatten()


def commit_errors(found: Tensor, before: Tensor, paths: list[list[int]], roots: list[int], tables: Tensor) -> int:
    """Slots that do not hold what a chain of the path would have left, in any layer."""
    wanted = before.clone()
    for r, path in enumerate(paths):
        for place, column in enumerate(path):
            here, there = roots[r] + place, roots[r] + column
            target = int(tables[r, here // BLOCK]) * BLOCK + here % BLOCK
            wanted[:, target] = before[:, int(tables[r, there // BLOCK]) * BLOCK + there % BLOCK]
    return int((found != wanted).flatten(2).any(-1).sum())
