"""Error of the recurrent ops against float64; run as a program, it prints the tables of their READMEs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.path[:0] = [str(here / folder) for folder in ("causal_conv", "gated_delta_rule", "selective_state")]

from state_cases import StateRequest, build_rows
from state_rounds import Inputs, OpCase, poison

DEPTHS = (1, 4, 8, 16)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _as_bf16(inputs: Inputs) -> Inputs:
    return tuple(x.bfloat16().float() for x in inputs)


def _follow(op: OpCase, state: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs of a chain and the state after it, float64."""
    outs = []
    for row in range(inputs[0].shape[0]):
        out, state = op.oracle(state, tuple(x[row].double() for x in inputs))
        outs.append(out)
    return torch.stack(outs), state


def walk_error(op: OpCase, depth: int, warm: int, seed: int = 0) -> tuple[float, float]:
    """Errors of a root with a chain of `depth` drafts, all accepted and folded.

    Inputs are rounded to bfloat16; the state before is that of `warm` tokens, rounded to float32.

    Returns:
        max |do| / rms(o) over all rows, and rms(dS) / rms(S) of the state after the fold.
    """
    generator = torch.Generator().manual_seed(seed)
    start = _follow(op, torch.zeros_like(op.draw_state(generator)).double(), _as_bf16(op.draw(warm, generator)))[1]
    inputs = _as_bf16(op.draw(depth + 1, generator))
    cache = poison(op, op.cache(2, depth + 1, torch.float32))
    stored = op.stored(cache)
    stored[1] = start
    wanted, state = _follow(op, stored[1].double(), inputs)
    slots = list(range(1, depth + 1))
    out = op.call(inputs, cache, build_rows([StateRequest(1, parents=list(range(-1, depth)), drafts=slots)], "replay"))
    op.fold(cache, build_rows([StateRequest(1, pending=slots)], "replay"))
    return float((out - wanted).abs().max() / _rms(wanted)), float(_rms(stored[1] - state) / _rms(state))


def chunk_error(op: OpCase, tokens: int, seed: int = 0) -> tuple[float, float]:
    """The same measures of a prompt of `tokens`, from a zero state, prefilled as one chunk."""
    generator = torch.Generator().manual_seed(seed)
    inputs = _as_bf16(op.draw(tokens, generator))
    cache = op.cache(2, 0, torch.float32)
    stored = op.stored(cache)
    wanted, state = _follow(op, stored[1].double(), inputs)
    out = op.call(inputs, cache, build_rows([StateRequest(1, chunk=tokens)], "slots"))
    return float((out - wanted).abs().max() / _rms(wanted)), float(_rms(stored[1] - state) / _rms(state))


def _main() -> None:
    from conv_cases import Conv
    from delta_rule_cases import DeltaRule
    from selective_cases import Mamba1, Mamba2

    torch.set_num_threads(1)
    ops = {
        "convolution, 1024 channels, K = 4": Conv(1024),
        "Gated DeltaNet, 8 heads of 128 x 128": DeltaRule(False, 4, 8, 128, 128, decay=0.0),
        "KDA, 8 heads of 128 x 128": DeltaRule(True, 8, 8, 128, 128, decay=0.0),
        "Mamba2, 16 heads of 64 x 128": Mamba2(16, 64, 1, 128, trained=True),
    }
    for name, op in ops.items():
        found = [walk_error(op, depth, warm=384) for depth in DEPTHS] + [chunk_error(op, 512)]
        print(name, *(f"{out:.1e}, {state:.1e}" for out, state in found), sep=" | ")
    print("Mamba1, 128 channels x 16", *(f"{x:.1e}" for x in chunk_error(Mamba1(128, 16), 512)), sep=" | ")


if __name__ == "__main__":
    _main()
