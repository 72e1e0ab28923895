"""Selective state spaces: Mamba2 over trees, chunks and rounds, Mamba1 over chunks and single tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from selective_cases import Mamba1, Mamba2
from state_cases import StateRequest, build_rows
from state_checks import (
    CONTROLS,
    TOLERANCE,
    check_bits,
    check_idle_steps,
    check_watch,
    control_worst,
    decode,
    host_waits,
    run_rounds,
    threads,
)
from state_device import check_chunks_on_gpu, check_on_gpu
from state_error import DEPTHS, walk_error
from state_rounds import Rounds, Shape, error, poison

from specround.contract import CapabilityError
from specround.kernels.state_rows import StateMode

MODES = pytest.mark.parametrize("mode", ["replay", "slots"])


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_random_trees(mode: StateMode, seed: int) -> None:
    """Outputs, states, drafts' states and snapshots follow the recurrence of each path, over rounds and a flush."""
    assert run_rounds(Mamba2(), mode, seed).worst <= TOLERANCE[torch.float32]


@MODES
def test_rounds_in_float64(mode: StateMode) -> None:
    """The formulas are exact: with float64 states nothing but float64 rounding is left."""
    assert run_rounds(Mamba2(), mode, 7, dtype=torch.float64).worst <= TOLERANCE[torch.float64]


@MODES
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (3, 3), (6, 2), (1, 1)])
@pytest.mark.parametrize(("head_dim", "state_dim", "skip"), [(1, 1, True), (8, 3, False), (5, 16, True)])
def test_head_and_dimension_shapes(
    mode: StateMode, heads: int, groups: int, head_dim: int, state_dim: int, skip: bool
) -> None:
    """Heads share b and c in order; odd and single dimensions work, with and without the skip of the input."""
    op = Mamba2(heads, head_dim, groups, state_dim, skip)
    assert run_rounds(op, mode, 1, requests=2, rounds=2, max_columns=5).worst <= TOLERANCE[torch.float32]


@MODES
def test_large_trees(mode: StateMode) -> None:
    """Trees of up to 33 rows."""
    assert run_rounds(Mamba2(), mode, 4, requests=2, rounds=3, max_columns=33).worst <= TOLERANCE[torch.float32]


@MODES
def test_strong_resets(mode: StateMode) -> None:
    """Decays of e^-90 amid slow ones neither overflow nor blur what follows them, in trees, folds and long chunks."""
    hard = replace(Mamba2(), reset=0.1)
    assert run_rounds(hard, mode, 2, chunks=(64, 130, 200)).worst <= TOLERANCE[torch.float32]


def test_chunks_of_every_length() -> None:
    """Chunks that end before, on and after a piece and a span, with and without a root behind them."""
    small = Mamba2(heads=2, head_dim=3, groups=1, state_dim=4)
    for length in (1, 2, 3, 31, 33, 63, 64, 65, 128, 1025):
        assert run_rounds(small, "replay", length, requests=2, rounds=1, chunks=(length, length + 1)).worst <= 5e-6


@MODES
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 19, 1, 33), (1, 1, 1, 16)])
def test_bits_are_those_of_decoding_alone(mode: StateMode, batch: int, shape: tuple[int, int, int, int]) -> None:
    """A row has the same bits as a token decoded alone: in any chain, tree and batch, after a fold, on two threads."""
    op = Mamba2(*shape, reset=0.05)
    check_bits(op, mode, batch, siblings=False, seed=batch)
    with threads(2):
        check_bits(op, mode, batch, siblings=True, seed=batch)


@pytest.mark.parametrize(("mode", "broken"), CONTROLS)
def test_controls_are_found(mode: StateMode, broken: str) -> None:
    """Negative control: wrong parents, a causal mask and wrong folds exceed the tolerance a thousandfold."""
    assert control_worst(Mamba2(), mode, "none") <= TOLERANCE[torch.float32]
    assert control_worst(Mamba2(), mode, broken) > 1000 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", [(6, 5), (7, 1), (9, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mamba1_chunks_and_single_tokens(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Mamba1 follows its recurrence through chunks of any length, single tokens, both at once, and idle steps."""
    rounds = Rounds(Mamba1(*shape), "slots", 3, 1, dtype)
    for length in (1, 3, 13, 64, 130):
        rounds.run([Shape(chunk=length, parents=[-1]), Shape(padded=True, parents=[-1]), Shape(chunk=3), Shape()])
        rounds.run([Shape(), Shape(parents=[-1], unused=1), Shape(chunk=length)])
    assert rounds.worst <= TOLERANCE[dtype]


@pytest.mark.parametrize("count", [1, 2])
def test_mamba1_bits_do_not_depend_on_the_batch(count: int) -> None:
    """Tokens decoded in a batch of any size have the bits of those decoded alone, on one thread and on two."""
    op, generator = Mamba1(401, 17), torch.Generator().manual_seed(0)
    for batch in (2, 3, 16):
        states = [op.draw_state(generator) for _ in range(batch)]
        inputs = [op.draw(3, generator) for _ in range(batch)]
        cache = poison(op, op.cache(batch + 1, 0))
        cache.states[1:] = torch.stack(states)
        requests = [StateRequest(r + 1, parents=[-1]) for r in range(batch)]
        alone = [decode(op, state, mine) for state, mine in zip(states, inputs, strict=True)]
        with threads(count):
            for token in range(3):
                packed = tuple(torch.stack([mine[i][token] for mine in inputs]) for i in range(4))
                out = op.call(packed, cache, build_rows(requests, "slots"))
                assert torch.equal(out, torch.stack([outs[token] for outs, _ in alone]))
        assert torch.equal(cache.states[1:], torch.stack([after[-1] for _, after in alone]))


def test_mamba1_refuses_pending_drafts() -> None:
    """A pending path is refused by name: Mamba1 has kept nothing that could be folded."""
    op = Mamba1()
    rows = build_rows([StateRequest(1, parents=[-1], pending=[1, 2])], "replay", spare_places=0)
    with pytest.raises(CapabilityError, match=r"pending\.slots has 2 places, must have 0"):
        op.call(op.draw(1, torch.Generator()), op.cache(2, 0), rows)
    rows = build_rows([StateRequest(1, parents=[-1])], "replay", spare_places=0)
    generator = torch.Generator().manual_seed(0)
    cache, inputs = op.cache(2, 0), op.draw(1, generator)
    wanted, _ = op.oracle(cache.states[1].double(), tuple(x[0].double() for x in inputs))
    assert error(op.call(inputs, cache, rows)[0], wanted) <= TOLERANCE[torch.float32]


@MODES
def test_idle_steps_change_nothing(mode: StateMode) -> None:
    """Steps without rows, with padded requests only and without requests leave every state as it is."""
    check_idle_steps(Mamba2(), mode)


@MODES
def test_nothing_waits_for_the_host(mode: StateMode) -> None:
    """No value is read on the host, so that a step can be captured into a graph; a watch that sees none is broken."""
    assert host_waits(Mamba2(), mode) == []
    check_watch()


@pytest.mark.parametrize("depth", DEPTHS)
def test_error_by_depth(depth: int) -> None:
    """Against float64, bfloat16 inputs and decays of an untrained model: the limits for float32 arithmetic."""
    output, state = walk_error(Mamba2(4, 32, 1, 64, trained=True), depth, warm=100)
    assert output <= 1e-5
    assert state <= 1e-6


@pytest.mark.gpu
@MODES
def test_on_a_gpu(mode: StateMode) -> None:
    """On a GPU, rows keep the bits of decoding, a step can be captured, and chunks agree with the CPU."""
    check_on_gpu(Mamba2(4, 32, 2, 64), mode)
    check_chunks_on_gpu(Mamba2(4, 32, 2, 64))
