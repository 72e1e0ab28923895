"""Speculative rounds over a small Markov law, vectorised over requests with distinct seeds, to test the law of texts.

Token x follows tokens (a, b) with probability `target[a, b, x]`. A text starts from two start symbols. Every round
drafts a random tree, draws the target's token at each row and accepts a path, until each request has its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specround.contract import AcceptResult, VerifyPlan
from specround.kernels.acceptance.naive import SampledRows, accept_tree, draw_tokens
from specround.kernels.acceptance.philox import STREAM_DRAFT, STREAM_MATCH, gumbel_noise
from specround.kernels.tree import TreeTables, committable_rows, tree_tables

V = 5
START = V
EMITTED = 3
PROMPT = 9


@dataclass
class Laws:
    """Target and drafter laws `[V + 1, V + 1, V]`; both have tokens of zero mass, not the same ones."""

    target: Tensor
    draft: Tensor


@dataclass
class Round:
    """What a round offers to a rule: the tree, its rows' laws and the target's draws.

    Attributes:
        laws: `[R, C, V]` target law of each row.
        draft_laws: `[R, C, V]` drafter law of each row.
        logits: Logarithms of `laws`.
        root_index: `[R]` token index of each root.
        drawn: `[R, C]`.
    """

    plan: VerifyPlan
    tables: TreeTables
    laws: Tensor
    draft_laws: Tensor
    logits: Tensor
    seeds: Tensor
    root_index: Tensor
    drawn: Tensor


Keying = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Rule = Callable[[Round], AcceptResult]


def random_laws(seed: int) -> Laws:
    """Random laws with one or two zero-mass tokens after every history; the drafter's is half like the target's."""
    generator = torch.Generator().manual_seed(seed)

    def law(weights: Tensor) -> Tensor:
        for _ in range(2):
            zero = torch.randint(0, V, (V + 1, V + 1, 1), generator=generator)
            weights = weights.scatter(2, zero, 0.0)
        return weights / weights.sum(-1, keepdim=True)

    weights, other = torch.rand(2, V + 1, V + 1, V, generator=generator) + 0.05
    return Laws(law(weights), law(weights + other))


def by_token_index(root_index: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """The contract's key: token index = root's index + depth + 1, in no way the row."""
    return root_index[:, None] + depth + 1, torch.zeros_like(depth)


def by_row(root_index: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: noise keyed by the row's column."""
    return root_index[:, None] + torch.arange(depth.shape[1]).expand_as(depth) + 1, torch.zeros_like(depth)


def by_row_and_index(root_index: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: siblings do not share noise; every row of a round has noise of its own, never used again."""
    return root_index[:, None] + depth + 1, torch.arange(depth.shape[1]).expand_as(depth) * 2**32


def match(state: Round) -> AcceptResult:
    """The built-in rule."""
    committable = committable_rows(state.tables, state.tables.ancestors, None)
    return accept_tree(state.plan, state.tables, committable, state.drawn)


def emit(
    laws: Laws,
    requests: int,
    children: str,
    *,
    columns: int = 5,
    seed: int = 0,
    keying: Keying = by_token_index,
    rule: Rule = match,
) -> tuple[Tensor, float]:
    """The first tokens of every request, and the mean number of tokens of the first round.

    Args:
        laws: Target and drafter laws.
        requests: R; request r has seed `seed + r`.
        children: How drafts are chosen, see `_draft`.
        columns: C; 1 is plain decoding.
        seed: First seed.
        keying: Token index, and an offset added to the seed, by which a row's noise is keyed.
        rule: Acceptance.

    Returns:
        `[R, EMITTED]` int64 tokens and the mean.
    """
    generator = torch.Generator().manual_seed(seed + columns)
    seeds = seed + torch.arange(requests)
    text = torch.full((requests, 2 + EMITTED + columns), START)
    count, per_round = torch.zeros(requests, dtype=torch.int64), 0.0
    while int(count.min()) < EMITTED:
        active = (count < EMITTED).nonzero()[:, 0]
        result = rule(_round(laws, text[active], count[active], seeds[active], children, columns, generator, keying))
        per_round = per_round or float(result.num_committed.double().mean())
        for i in range(columns):
            place = torch.where(i < result.num_committed, 2 + count[active] + i, text.shape[1] - 1)
            text[active, place] = result.token_ids[:, i]
        count[active] += result.num_committed
    return text[:, 2 : 2 + EMITTED], per_round


def _round(
    laws: Laws,
    text: Tensor,
    count: Tensor,
    seeds: Tensor,
    children: str,
    columns: int,
    generator: torch.Generator,
    keying: Keying,
) -> Round:
    requests, request = len(count), torch.arange(len(count))
    raw = torch.rand(requests, columns, generator=generator)
    parents = (raw * torch.arange(columns)).to(torch.int64)
    parents[:, 0] = -1
    used = torch.randint(max(1, columns // 2), columns + 1, (requests,), generator=generator)
    tables, root_index = tree_tables(parents), PROMPT + count
    tokens, before = torch.zeros(2, requests, columns, dtype=torch.int64)
    tokens[:, 0], before[:, 0] = text[request, 1 + count], text[request, count]
    children_of = torch.zeros(requests, columns, dtype=torch.int64)
    for column in range(1, columns):
        parent = parents[:, column]
        history = before[request, parent], tokens[request, parent]
        index = root_index + tables.depth[request, parent] + 1
        order = children_of[request, parent]
        tokens[:, column] = _draft(laws, history, order, seeds, index, children, generator)
        before[:, column] = history[1]
        children_of[request, parent] += 1
    plan = VerifyPlan(tokens, used.to(torch.int32), parents.to(torch.int32))
    target = laws.target[before, tokens]
    logits = target.log()
    index, offset = keying(root_index, tables.depth.to(torch.int64))
    rows = SampledRows(torch.arange(requests * columns), (seeds[:, None] + offset).flatten(), index.flatten())
    drawn = draw_tokens(logits.flatten(0, 1), rows).view(requests, columns)
    return Round(plan, tables, target, laws.draft[before, tokens], logits, seeds, root_index, drawn)


def _draft(
    laws: Laws,
    history: tuple[Tensor, Tensor],
    order: Tensor,
    seeds: Tensor,
    index: Tensor,
    children: str,
    generator: torch.Generator,
) -> Tensor:
    """Child number `order` after a history: any token, the drafter's best, its draws, or its draws with match noise."""
    if children == "uniform":
        return torch.randint(0, V, order.shape, generator=generator)
    scores = laws.draft[history[0], history[1]].log()
    if children in ("drawn", "shared noise"):
        stream = STREAM_DRAFT if children == "drawn" else STREAM_MATCH
        scores = scores + gumbel_noise(seeds, index, V, stream)
    elif children == "duplicates":
        order = order // 2
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    return ranked.gather(1, (order % V)[:, None])[:, 0]


def joint_law(target: Tensor) -> Tensor:
    """`[V, V, V]` float64, the product law of the first three tokens."""
    p = target.double()
    first, second, third = p[START, START], p[START, :V], p[:V, :V]
    return first[:, None, None] * second[:, :, None] * third


def z_score(tokens: Tensor, law: Tensor) -> float:
    """`(chi2 - dof) / sqrt(2 dof)`; infinite if a zero-mass cell occurs. Cells with few expected draws are pooled."""
    cell = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    seen, expected = torch.bincount(cell, minlength=V**3).double(), law.flatten() * len(tokens)
    if bool((seen[expected == 0] > 0).any()):
        return math.inf
    small = (expected < 10) & (expected > 0)
    large = expected >= 10
    seen = torch.cat([seen[large], seen[small].sum()[None]])
    expected = torch.cat([expected[large], expected[small].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    dof = len(expected) - 1
    return float((((seen - expected) ** 2 / expected).sum() - dof) / math.sqrt(2 * dof))
