"""Packed rows over a poisoned paged cache, and a float64 oracle that attends row by row over explicitly listed keys."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tree_oracles import ancestors_of, as_int64, depth_of

from specround.kernels.tree_attention.naive import tree_attention
from specround.kernels.tree_attention.rows import RowContext, lay_out_rows


@dataclass
class Row:
    """One packed row: the token slots it sees, where it sits, and how the layout says so."""

    keys: list[int]
    position: int
    context_len: int
    columns: set[int] = field(default_factory=set)


@dataclass
class Request:
    """A request of a step.

    Attributes:
        rows: Its used rows.
        unused: Physical rows after them that see nothing.
        base: Token slot of column 0.
        key_positions: Logical position of each held slot.
        offsets: Logical offset of each column.
    """

    rows: list[Row]
    base: int
    key_positions: list[int]
    offsets: list[int] = field(default_factory=list)
    unused: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) + self.unused


def chunk(start: int, length: int, unused: int = 0) -> Request:
    """A prefill chunk, or a chain in decode: row i sees every slot up to its own."""
    rows = [Row(list(range(start + i + 1)), start + i, start + i + 1) for i in range(length)]
    return Request(rows, start + length, list(range(start + length)), unused=unused)


def plan_rows(context: int, seen: list[set[int]], offsets: list[int], unused: int = 0) -> Request:
    """Plan rows after a context: row c sees the context and the columns `seen[c]`, at `offsets[c]` from the root."""
    keys = [list(range(context)) + [context + c for c in sorted(columns)] for columns in seen]
    rows = [Row(keys[c], context + offsets[c], context, columns) for c, columns in enumerate(seen)]
    key_positions = list(range(context)) + [context + offset for offset in offsets]
    return Request(rows, context, key_positions, offsets, unused)


def tree(context: int, parents: list[int], unused: int = 0) -> Request:
    """A tree: rows see their ancestors and sit at their depth."""
    columns = range(len(parents))
    return plan_rows(
        context, [ancestors_of(parents, c) for c in columns], [depth_of(parents, c) for c in columns], unused
    )


def masked(context: int, columns: int, rng: random.Random, unused: int = 0) -> Request:
    """A mask with explicit positions: any earlier columns, any offset >= 0."""
    seen = [{j for j in range(i) if rng.random() < 0.5} | {i} for i in range(columns)]
    return plan_rows(context, seen, [0] + [rng.randrange(2 * columns) for _ in range(columns - 1)], unused)


@dataclass(frozen=True)
class Setting:
    """Shapes and features of a layer."""

    block_size: int = 4
    kv_heads: int = 2
    repeats: int = 2
    key_dim: int = 8
    value_dim: int = 6
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None


@dataclass
class Case:
    """Tensors of one forward. The caches hold NaN in every slot that no request owns, except in the null block."""

    requests: list[Request]
    setting: Setting
    context: RowContext
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    sinks: Tensor | None
    scale: float

    @property
    def num_rows(self) -> list[int]:
        return [request.num_rows for request in self.requests]

    @property
    def used_rows(self) -> list[int]:
        """Packed rows that see something."""
        found, first = [], 0
        for request in self.requests:
            found += range(first, first + len(request.rows))
            first += request.num_rows
        return found


def build(requests: list[Request], setting: Setting, seed: int) -> Case:
    """Lay requests out over shuffled blocks of a poisoned cache."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = setting.block_size
    counts = [-(-len(request.key_positions) // size) for request in requests]
    blocks = list(range(1, sum(counts) + 3))
    rng.shuffle(blocks)
    stale, width = blocks.pop(), max(counts) + 2
    key_cache = torch.full(((sum(counts) + 3) * size, setting.kv_heads, setting.key_dim), float("nan"))
    value_cache = torch.full((key_cache.shape[0], setting.kv_heads, setting.value_dim), float("nan"))
    key_cache[:size], value_cache[:size] = 0, 0
    tables = []
    for request, count in zip(requests, counts, strict=True):
        tables.append([blocks.pop() for _ in range(count)])
        for token in range(len(request.key_positions)):
            slot = tables[-1][token // size] * size + token % size
            key_cache[slot] = torch.randn(key_cache.shape[1:], generator=generator)
            value_cache[slot] = torch.randn(value_cache.shape[1:], generator=generator)
        tables[-1] += [stale] * (width - count)
    heads = setting.kv_heads * setting.repeats
    query = torch.randn(sum(r.num_rows for r in requests), heads, setting.key_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if setting.sinks else None
    context = row_context(requests, torch.tensor(tables), size)
    return Case(requests, setting, context, query, key_cache, value_cache, sinks, 1.7 * setting.key_dim**-0.5)


def row_context(requests: list[Request], tables: Tensor, block_size: int) -> RowContext:
    """The layout's view of the requests; offsets of unused columns are far away."""
    starts, rows = [0], []
    for request in requests:
        starts.append(starts[-1] + request.num_rows)
        rows += request.rows + [Row([], 50, 0)] * request.unused
    columns = max(len(request.offsets) for request in requests)
    offsets = [request.offsets + [10**6] * (columns - len(request.offsets)) for request in requests]
    return RowContext(
        row_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([row.context_len for row in rows]),
        positions=torch.tensor([row.position for row in rows]),
        kv_len=torch.tensor([len(request.key_positions) for request in requests]),
        base=torch.tensor([request.base for request in requests]),
        bits=torch.tensor([as_int64(row.columns) for row in rows]) if columns else None,
        key_offsets=torch.tensor(offsets) if columns else None,
        block_tables=tables,
        block_size=block_size,
    )


def run(case: Case, **changes: object) -> Tensor:
    """The op on a case; `changes` replace parts of the row context."""
    context = replace(case.context, **changes)
    bounds = [len(request.key_positions) + place % 3 for place, request in enumerate(case.requests)]
    rows = lay_out_rows(case.num_rows, bounds, context)
    return attend(case, rows)


def attend(case: Case, rows: object) -> Tensor:
    """The op on rows that are laid out already."""
    return tree_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        rows,
        scale=case.scale,
        window=case.setting.window,
        sinks=case.sinks,
        softcap=case.setting.softcap,
    )


def oracle(case: Case) -> Tensor:
    """`[N, H, Dv]` float64, NaN in unused rows: softmax over the listed keys, one row and one head at a time."""
    setting = case.setting
    out = torch.full((*case.query.shape[:2], setting.value_dim), float("nan"), dtype=torch.float64)
    first = 0
    for r, request in enumerate(case.requests):
        table = case.context.block_tables[r].tolist()
        for i, row in enumerate(request.rows):
            keys = row.keys
            if setting.window is not None:
                keys = [key for key in keys if row.position - request.key_positions[key] < setting.window]
            slots = [table[key // setting.block_size] * setting.block_size + key % setting.block_size for key in keys]
            for head in range(case.query.shape[1]):
                out[first + i, head] = _attend_row(case, first + i, head, slots)
        first += request.num_rows
    return out


def _attend_row(case: Case, row: int, head: int, slots: list[int]) -> Tensor:
    setting = case.setting
    keys = case.key_cache[slots, head // setting.repeats].double()
    values = case.value_cache[slots, head // setting.repeats].double()
    scores = (keys * case.query[row, head].double()).sum(-1) * case.scale
    if setting.softcap is not None:
        scores = setting.softcap * torch.tanh(scores / setting.softcap)
    weights = scores.exp()
    total = weights.sum() + (0 if case.sinks is None else case.sinks[head].double().exp())
    return (weights[:, None] * values).sum(0) / total


def error(found: Tensor, case: Case) -> float:
    """Largest difference from the oracle on used rows, relative to the largest value; infinite where NaN."""
    wanted = oracle(case)[case.used_rows]
    difference = (found[case.used_rows].double() - wanted).abs().nan_to_num(nan=float("inf"))
    return float(difference.max() / wanted.abs().max())
