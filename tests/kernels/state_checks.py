"""Checks that every recurrent op must pass, and the broken variants that they must find."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from state_cases import StateRequest, build_rows
from state_rounds import Inputs, OpCase, Rounds, Shape, poison
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tree_oracles import SHAPES, parent_of

from specround.kernels.state_rows import ChunkGroup, StateMode, StateRows

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}
CONTROLS = [(mode, broken) for mode in ("replay", "slots") for broken in ("row before", "causal")]
CONTROLS += [("replay", "fold one less"), ("replay", "double fold")]


def random_tree(rng: random.Random, max_columns: int) -> list[int]:
    """Parents of a tree of any shape."""
    shape = rng.choice(SHAPES)
    columns = rng.randint(1, max_columns)
    return [-1] + [parent_of(shape, column, rng.randrange(2**16)) for column in range(1, columns)]


def random_shapes(rng: random.Random, requests: int, max_columns: int, chunks: tuple[int, ...]) -> list[Shape]:
    """What a ragged batch does in a step: trees, chunks that end or go on, nothing; padded requests in between."""
    shapes = []
    for _ in range(requests):
        if rng.random() < 0.2:
            drafts = [-1, 0] if rng.random() < 0.5 else [-1]
            shapes.append(Shape(chunk=rng.choice((0, 2)), parents=drafts, padded=True))
        chunk = rng.choice(chunks) if rng.random() < 0.4 else 0
        tree = random_tree(rng, max_columns) if rng.random() < 0.8 else []
        shapes.append(Shape(chunk=chunk, parents=tree, unused=rng.choice((0, 0, 1, 3))))
    return shapes


def run_rounds(
    op: OpCase,
    mode: StateMode,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    requests: int = 3,
    rounds: int = 4,
    max_columns: int = 9,
    chunks: tuple[int, ...] = (1, 2, 3, 5, 7, 67, 100),
) -> Rounds:
    """Rounds with random trees, chunks and accepted paths, then a flush."""
    rng = random.Random(seed)
    done = Rounds(op, mode, requests, seed, dtype, max_rows=max_columns)
    done.run([Shape(parents=[-1, 0, 0, 1])] * (requests - 1) + [Shape(parents=[-1, 0])])  # a batch that ends in a draft
    for _ in range(rounds):
        done.run(random_shapes(rng, requests, max_columns, chunks))
    done.flush()
    return done


def _as_chain(rows: StateRows) -> StateRows:
    """Every plan row reads the row before it instead of its parent."""
    requests = []
    for r in range(rows.num_requests):
        mine = (rows.row_request == r).nonzero().flatten().tolist()
        chunk = sum(int((group.rows[group.requests == r] < rows.num_rows).sum()) for group in rows.chunks)
        parents = list(range(-1, len(mine) - chunk - 1))
        requests.append(StateRequest(int(rows.committed_block[r]), chunk=chunk, parents=parents))
    chain = build_rows(requests, rows.mode)
    return replace(rows, parents=chain.parents, levels=chain.levels, _taps={})


def _causal(rows: StateRows) -> StateRows:
    """Drafts run as a chunk behind the root: a causal mask instead of the tree's."""
    groups = list(rows.chunks)
    for r in range(rows.num_requests):
        drafts = [row for level in rows.levels[1:] for row in level.rows.tolist() if row < rows.num_rows]
        drafts = sorted(row for row in drafts if int(rows.row_request[row]) == r)
        root = [row for row in rows.levels[0].rows.tolist() if row < rows.num_rows and int(rows.row_request[row]) == r]
        if root:
            groups.append(ChunkGroup(requests=torch.tensor([r]), rows=torch.tensor([sorted(root + drafts)])))
    parents = torch.arange(rows.num_rows) - 1
    parents[rows.parents < 0] = -1
    return replace(rows, parents=parents, levels=(), chunks=tuple(groups), _taps={})


def _fold_one_less(rows: StateRows) -> StateRows:
    """The accepted path without its last draft."""
    assert rows.pending is not None
    return replace(rows, pending=replace(rows.pending, length=(rows.pending.length - 1).clamp(min=0)))


def control_worst(op: OpCase, mode: StateMode, broken: str) -> float:
    """How far the outputs or states of a broken variant are from the oracle's, over two rounds of bushy trees.

    Args:
        op: Op under test.
        mode: State mode; the two broken folds are of mode "replay".
        broken: "none", "row before", "causal", "fold one less" or "double fold".
    """
    rounds = Rounds(op, mode, 2, seed=5)
    trees = [[-1, 0, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 1, 2]]

    def double_fold(rows: StateRows) -> StateRows:
        op.fold(rounds.cache, rows)
        return rows

    spoils: dict[str, Callable[[StateRows], StateRows]] = {
        "none": lambda rows: rows,
        "row before": _as_chain,
        "causal": _causal,
        "fold one less": _fold_one_less,
        "double fold": double_fold,
    }
    rounds.run([Shape(chunk=3, parents=trees[0]), Shape(parents=trees[1])])
    while mode == "replay" and not all(mine.request.pending for mine in rounds.live):
        rounds.run([Shape(parents=tree) for tree in trees])
    assert rounds.worst <= TOLERANCE[torch.float32]
    rounds.spoil = spoils[broken]
    rounds.run([Shape(parents=tree) for tree in trees])
    return rounds.worst


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decode(op: OpCase, state: Tensor, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and states of a request that decodes alone, one token per step."""
    cache = poison(op, op.cache(2, 0, torch.float32))
    op.stored(cache)[1] = state
    outs, states = [], []
    for token in range(inputs[0].shape[0]):
        rows = build_rows([StateRequest(1, parents=[-1])], "slots")
        outs.append(op.call(tuple(x[token : token + 1] for x in inputs), cache, rows)[0].clone())
        states.append(op.stored(cache)[1].clone())
    return outs, states


def _around_a_chain(rng: random.Random, tokens: int, siblings: bool) -> tuple[list[int], list[int]]:
    """A tree that contains a chain of `tokens` rows, and the columns of that chain."""
    parents, chain = [-1], [0]
    while len(chain) < tokens:
        if siblings and rng.random() < 0.5:
            parents.append(rng.randrange(len(parents)))
        else:
            parents.append(chain[-1])
            chain.append(len(parents) - 1)
    return parents, chain


def check_bits(op: OpCase, mode: StateMode, batch: int, *, siblings: bool, seed: int, tokens: int = 6) -> None:
    """A chain of a tree in a batch, then a fold of part of it, against the same tokens decoded alone, bit for bit."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state, inputs = op.draw_state(generator), op.draw(tokens + 1, generator)
    with threads(1):
        wanted_outs, wanted_states = decode(op, state, inputs)
    parents, chain = _around_a_chain(rng, tokens, siblings)
    trees = [random_tree(rng, 9) for _ in range(batch)]
    place = rng.randrange(batch)
    trees[place] = parents
    drafts, used = [], 0
    for tree in trees:
        drafts.append([batch + 1 + used + i for i in range(len(tree) - 1)])
        used += len(tree) - 1
    cache = poison(op, op.cache(batch + 1 + (used if mode == "slots" else 0), batch + 1 + used, torch.float32))
    for block in range(1, batch + 1):
        op.stored(cache)[block] = op.draw_state(generator)
    op.stored(cache)[place + 1] = state
    requests = [StateRequest(r + 1, parents=trees[r], drafts=drafts[r]) for r in range(batch)]
    first = sum(len(tree) for tree in trees[:place])
    mine = first + torch.tensor(chain)
    packed = op.draw(sum(map(len, trees)), generator)
    for x, y in zip(packed, inputs, strict=True):
        x[mine] = y[:tokens]
    out = op.call(packed, cache, build_rows(requests, mode, seed))
    assert torch.equal(out[mine], torch.stack(wanted_outs[:tokens]))
    assert torch.equal(op.stored(cache)[place + 1], wanted_states[0])
    path = [drafts[place][column - 1] for column in chain[1:]]
    if mode == "slots":
        assert torch.equal(op.stored(cache)[path], torch.stack(wanted_states[1:tokens]))
        return
    accepted = rng.randint(1, tokens - 1)
    later = [StateRequest(r + 1, parents=[-1], pending=drafts[r][: rng.randrange(4)]) for r in range(batch)]
    later[place].pending = path[:accepted]
    packed = op.draw(batch, generator)
    for x, y in zip(packed, inputs, strict=True):
        x[place] = y[accepted + 1]
    flushed = op.stored(cache).clone()
    out = op.call(packed, cache, build_rows(later, "replay", seed))
    _check_next_token(op, inputs, wanted_states[accepted], accepted + 1, out[place], op.stored(cache)[place + 1])
    op.stored(cache).copy_(flushed)
    op.fold(cache, build_rows([StateRequest(q.block, pending=q.pending) for q in later], "replay"))
    assert torch.equal(op.stored(cache)[place + 1], wanted_states[accepted])


def _check_next_token(op: OpCase, inputs: Inputs, state: Tensor, token: int, out: Tensor, stored: Tensor) -> None:
    """What a fold and one more token left, against that token decoded alone from the state of the path."""
    with threads(1):
        outs, states = decode(op, state, tuple(x[token : token + 1] for x in inputs))
    assert torch.equal(out, outs[0])
    assert torch.equal(stored, states[0])


def check_idle_steps(op: OpCase, mode: StateMode) -> None:
    """Steps without rows, with only padded requests and without requests leave states as they are, bit for bit."""
    cache = poison(op, op.cache(4, 5 if mode == "replay" else 0, torch.float32))
    generator = torch.Generator().manual_seed(0)
    for block in (1, 2, 3):
        op.stored(cache)[block] = op.draw_state(generator)
    before = op.stored(cache).clone()
    nothing = [StateRequest(2), StateRequest(0), StateRequest(1)]
    for requests, rows in ((nothing, 0), ([StateRequest(0, parents=[-1, 0], chunk=2)], 4), ([], 0)):
        inputs = tuple(torch.full_like(x, float("nan")) for x in op.draw(rows, generator))
        laid_out = build_rows(requests, mode, spare_places=3)
        assert op.call(inputs, cache, laid_out).shape[0] == rows
        op.fold(cache, laid_out)
        assert torch.equal(op.stored(cache)[1:], before[1:])


class _Watch(TorchDispatchMode):
    """Counts operations that wait for a value on the host."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for y in args if isinstance(y, (list, tuple)) for x in y
        )
        if name in self.WAITING or masks:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def host_waits(op: OpCase, mode: StateMode) -> list[str]:
    """Operations of a step and a flush that read a value on the host, by name."""
    generator = torch.Generator().manual_seed(0)
    cache = op.cache(12, 12 if mode == "replay" else 0, torch.float32)
    trees = [[-1, 0, 0, 1], [-1, 0]]
    requests = [StateRequest(1, chunk=70, parents=trees[0], drafts=[3, 4, 5]), StateRequest(2, parents=trees[1])]
    requests[1].pending, requests[1].snapshot = [7, 8], (1, 9)
    rows = build_rows(requests, mode)
    inputs = op.draw(rows.num_rows, generator)
    with _Watch() as watch:
        op.call(inputs, cache, rows)
        op.fold(cache, rows)
    return watch.waits


def check_watch() -> None:
    """Negative control: the watch sees an item, a boolean mask and a count."""
    x = torch.arange(3.0)
    with _Watch() as watch:
        x[x > 1].sum().item()
        x[torch.tensor([True, False, True])] = 0
        torch.nonzero(x)
    assert set(watch.waits) >= {"_local_scalar_dense", "nonzero"}
    assert len(watch.waits) >= 4
