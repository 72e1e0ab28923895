"""The causal convolution over trees, chunks and rounds."""

from __future__ import annotations

import pytest
import torch
from conv_cases import Conv
from state_cases import StateRequest, build_rows
from state_checks import (
    CONTROLS,
    TOLERANCE,
    check_bits,
    check_idle_steps,
    check_watch,
    control_worst,
    host_waits,
    run_rounds,
    threads,
)
from state_device import check_chunks_on_gpu, check_on_gpu
from state_error import walk_error
from state_rounds import poison
from torch.nn import functional

from specround.kernels.state_rows import StateMode

MODES = pytest.mark.parametrize("mode", ["replay", "slots"])


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_random_trees(mode: StateMode, seed: int) -> None:
    """Outputs follow each row's ancestors; windows, drafts' windows and snapshots are copies, bit for bit."""
    done = run_rounds(Conv(), mode, seed, rounds=6)
    assert done.worst_output <= TOLERANCE[torch.float32]
    assert done.worst_state == done.worst_snapshot == 0


@MODES
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_widths(mode: StateMode, width: int, with_bias: bool) -> None:
    """Windows longer and shorter than chunks, paths and trees, with and without a bias."""
    for seed in range(2):
        done = run_rounds(Conv(3, width, with_bias), mode, seed, dtype=torch.float64)
        assert done.worst_output <= TOLERANCE[torch.float64]
        assert done.worst_state == done.worst_snapshot == 0


@MODES
def test_large_trees(mode: StateMode) -> None:
    """Trees of up to 33 rows."""
    assert run_rounds(Conv(), mode, 4, requests=2, rounds=4, max_columns=33).worst <= TOLERANCE[torch.float32]


@MODES
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("channels", [1, 37, 600])
def test_bits_are_those_of_decoding_alone(mode: StateMode, batch: int, channels: int) -> None:
    """A row has the same bits as a token decoded alone: in any chain, tree and batch, after a fold, on two threads."""
    op = Conv(channels)
    check_bits(op, mode, batch, siblings=False, seed=batch)
    with threads(2):
        check_bits(op, mode, batch, siblings=True, seed=batch)


def test_a_chunk_has_the_bits_of_decoding() -> None:
    """The sum over taps is the same in a chunk of a prompt as token by token, and is a convolution."""
    op, generator = Conv(9), torch.Generator().manual_seed(0)
    inputs, state = op.draw(70, generator), op.draw_state(generator)
    caches = [poison(op, op.cache(2, 0, torch.float32)) for _ in range(2)]
    for cache in caches:
        cache.windows[1] = state
    chunk = op.call(inputs, caches[0], build_rows([StateRequest(1, chunk=70)], "slots"))
    step = build_rows([StateRequest(1, parents=[-1])], "slots")
    decoded = [op.call((inputs[0][i : i + 1],), caches[1], step) for i in range(70)]
    assert torch.equal(chunk, torch.cat(decoded))
    assert torch.equal(caches[0].windows[1], caches[1].windows[1])
    row = torch.cat([state, inputs[0]]).T[None].double()
    wanted = functional.conv1d(row, op.weight().double()[:, None], op.bias().double(), groups=9)[0].T
    assert (chunk - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_wide(dtype: torch.dtype) -> None:
    """Windows keep 16-bit inputs as they are; the output is rounded once."""
    op, generator = Conv(33), torch.Generator().manual_seed(0)
    cache = op.cache(4, 0, dtype)
    cache.windows[1] = op.draw_state(generator).to(dtype)
    window, x = cache.windows[1].double(), op.draw(3, generator)[0].to(dtype)
    rows = build_rows([StateRequest(1, parents=[-1, 0, 0], drafts=[2, 3])], "slots")
    out = op.call((x,), cache, rows)
    assert out.dtype == dtype
    wanted, window = op.oracle(window, (x[0].double(),))
    assert torch.equal(cache.windows[1].double(), window)
    assert (out[0].double() - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()
    for row in (1, 2):
        wanted, after = op.oracle(window, (x[row].double(),))
        assert torch.equal(cache.windows[1 + row].double(), after)
        assert (out[row].double() - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize(("mode", "broken"), CONTROLS)
def test_controls_are_found(mode: StateMode, broken: str) -> None:
    """Negative control: wrong parents, a causal mask and wrong folds exceed the tolerance a thousandfold."""
    assert control_worst(Conv(), mode, "none") <= TOLERANCE[torch.float32]
    assert control_worst(Conv(), mode, broken) > 1000 * TOLERANCE[torch.float32]


@MODES
def test_idle_steps_change_nothing(mode: StateMode) -> None:
    """Steps without rows, with padded requests only and without requests leave every state as it is."""
    check_idle_steps(Conv(), mode)


@MODES
def test_nothing_waits_for_the_host(mode: StateMode) -> None:
    """No value is read on the host, so that a step can be captured into a graph; a watch that sees none is broken."""
    assert host_waits(Conv(), mode) == []
    check_watch()


def test_error_of_the_sum() -> None:
    """Against float64 with bfloat16 inputs: the error of a float32 sum of four terms."""
    output, window = walk_error(Conv(64), 8, warm=5)
    assert output <= 2e-6
    assert window == 0


@pytest.mark.gpu
@MODES
def test_on_a_gpu(mode: StateMode) -> None:
    """On a GPU, rows keep the bits of decoding, a step can be captured, and chunks agree with the CPU."""
    check_on_gpu(Conv(600), mode)
    check_chunks_on_gpu(Conv(600))
