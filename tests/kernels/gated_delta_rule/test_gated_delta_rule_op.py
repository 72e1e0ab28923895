"""The gated delta rule over trees, chunks and rounds, for one decay per head and one per channel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_rule_cases import DeltaRule
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

from specround.kernels.state_rows import StateMode

GDN, KDA = DeltaRule(), DeltaRule(channel_decay=True)
BOTH = pytest.mark.parametrize("op", [GDN, KDA], ids=["gdn", "kda"])
MODES = pytest.mark.parametrize("mode", ["replay", "slots"])


@BOTH
@MODES
@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_random_trees(op: DeltaRule, mode: StateMode, seed: int) -> None:
    """Outputs, states, drafts' states and snapshots follow the recurrence of each path, over rounds and a flush."""
    assert run_rounds(op, mode, seed).worst <= TOLERANCE[torch.float32]


@BOTH
@MODES
def test_rounds_in_float64(op: DeltaRule, mode: StateMode) -> None:
    """The formulas are exact: with float64 states nothing but float64 rounding is left."""
    assert run_rounds(op, mode, 7, dtype=torch.float64).worst <= TOLERANCE[torch.float64]


@BOTH
@MODES
@pytest.mark.parametrize(("key_heads", "repeats"), [(1, 4), (3, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (8, 3), (5, 16)])
def test_head_and_dimension_shapes(
    op: DeltaRule, mode: StateMode, key_heads: int, repeats: int, key_dim: int, value_dim: int
) -> None:
    """Value heads share key heads in order; odd and single dimensions work."""
    shaped = replace(
        op, key_heads=key_heads, value_heads=key_heads * repeats, key_dim=key_dim, value_dim=value_dim, decay=1.0
    )
    assert run_rounds(shaped, mode, 1, requests=2, rounds=2, max_columns=5).worst <= TOLERANCE[torch.float32]


@BOTH
@MODES
def test_large_trees(op: DeltaRule, mode: StateMode) -> None:
    """Trees of up to 33 rows."""
    assert run_rounds(op, mode, 4, requests=2, rounds=3, max_columns=33).worst <= TOLERANCE[torch.float32]


@BOTH
def test_strong_resets(op: DeltaRule) -> None:
    """Decays of e^-90 amid slow ones neither overflow nor blur what follows them, in trees, folds and long chunks."""
    hard = replace(op, reset=0.1, decay=0.02)
    for mode in ("replay", "slots"):
        assert run_rounds(hard, mode, 2, chunks=(64, 130, 200)).worst <= TOLERANCE[torch.float32]


@BOTH
def test_equal_keys_in_a_chunk(op: DeltaRule) -> None:
    """Forward substitution stays accurate where powers of the score matrix explode: one key, beta 1, no decay."""

    class OneKey(DeltaRule):
        def draw(self, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
            query, key, value, log_decay, beta = super().draw(rows, generator)
            same = key[:1].expand_as(key).clone() if rows else key
            return query, same, value, torch.zeros_like(log_decay), torch.ones_like(beta)

    hard = OneKey(channel_decay=op.channel_decay)
    assert run_rounds(hard, "replay", 3, chunks=(64, 150)).worst <= TOLERANCE[torch.float32]


@BOTH
def test_chunks_of_every_length(op: DeltaRule) -> None:
    """Chunks that end before, on and after a piece and a span, with and without a root behind them."""
    small = replace(op, key_heads=1, value_heads=1, key_dim=4, value_dim=3)
    for length in (1, 2, 3, 31, 33, 63, 64, 65, 128, 1025):
        assert run_rounds(small, "replay", length, requests=2, rounds=1, chunks=(length, length + 1)).worst <= 5e-6


@BOTH
@MODES
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("shape", [(2, 4, 7, 5), (1, 4, 33, 19), (1, 1, 16, 1)])
def test_bits_are_those_of_decoding_alone(
    op: DeltaRule, mode: StateMode, batch: int, shape: tuple[int, int, int, int]
) -> None:
    """A row has the same bits as a token decoded alone: in any chain, tree and batch, after a fold, on two threads."""
    shaped = replace(
        op, key_heads=shape[0], value_heads=shape[1], key_dim=shape[2], value_dim=shape[3], reset=0.05, decay=1.0
    )
    check_bits(shaped, mode, batch, siblings=False, seed=batch)
    with threads(2):
        check_bits(shaped, mode, batch, siblings=True, seed=batch)


@BOTH
@pytest.mark.parametrize(("mode", "broken"), CONTROLS)
def test_controls_are_found(op: DeltaRule, mode: StateMode, broken: str) -> None:
    """Negative control: wrong parents, a causal mask and wrong folds exceed the tolerance a thousandfold."""
    assert control_worst(op, mode, "none") <= TOLERANCE[torch.float32]
    assert control_worst(op, mode, broken) > 1000 * TOLERANCE[torch.float32]


@BOTH
@MODES
def test_idle_steps_change_nothing(op: DeltaRule, mode: StateMode) -> None:
    """Steps without rows, with padded requests only and without requests leave every state as it is."""
    check_idle_steps(op, mode)


@BOTH
@MODES
def test_nothing_waits_for_the_host(op: DeltaRule, mode: StateMode) -> None:
    """No value is read on the host, so that a step can be captured into a graph; a watch that sees none is broken."""
    assert host_waits(op, mode) == []
    check_watch()


@BOTH
@pytest.mark.parametrize("depth", DEPTHS)
def test_error_by_depth(op: DeltaRule, depth: int) -> None:
    """Against float64, bfloat16 inputs and decays of an untrained model: the limits for float32 arithmetic."""
    wide = replace(op, key_heads=1, value_heads=2, key_dim=64, value_dim=64, decay=0.0)
    output, state = walk_error(wide, depth, warm=100)
    assert output <= 1e-5
    assert state <= 1e-6


@BOTH
def test_a_chunk_has_other_bits(op: DeltaRule) -> None:
    """Negative control of the comparison of bits: matrix products give nearly the same values, not the same bits."""
    wide = replace(op, key_dim=64, value_dim=64)
    generator = torch.Generator().manual_seed(0)
    inputs = wide.draw(40, generator)
    outs, states = decode(wide, torch.zeros(wide.value_heads, 64, 64), inputs)
    cache = wide.cache(2, 0)
    found = wide.call(inputs, cache, build_rows([StateRequest(1, chunk=40)], "slots"))
    assert 0 < (found - torch.stack(outs)).abs().max() <= 1e-5 * found.abs().max()
    assert 0 < (cache.states[1] - states[-1]).abs().max() <= 1e-5 * states[-1].abs().max()


@pytest.mark.gpu
@BOTH
@MODES
def test_on_a_gpu(op: DeltaRule, mode: StateMode) -> None:
    """On a GPU, rows keep the bits of decoding, a step can be captured, and chunks agree with the CPU."""
    check_on_gpu(replace(op, key_dim=64, value_dim=48), mode)
    check_chunks_on_gpu(replace(op, key_dim=64, value_dim=48))
