"""The gate: a speculator that changes the text is never timed."""

from __future__ import annotations

import json

import pytest

from specround.bench import gate
from specround.bench.batches import BatchPrompts
from specround.bench.gate import agreement
from specround.bench.variants import Run

HONEST, LYING = (
    json.dumps({"method": "lying:LyingConfig", "num_speculative_tokens": 1, "rank": rank}) for rank in (0, 1)
)


@pytest.fixture
def untimed(monkeypatch):
    """Timing fails."""

    def measure(*_: object) -> None:
        raise AssertionError("timed behind the gate's back")

    monkeypatch.setattr("specround.bench.run.measure", measure)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_liar_is_refused(bench, untimed, dtype):
    """A speculator that commits the runner-up fails in float32 and in bfloat16: code 1, no number, a reason."""
    finished = bench("--no-peers", "--speculative-config", LYING, "--dtype", dtype)
    assert (finished.code, finished.out, len(finished.err.splitlines())) == (1, "", 1)
    assert "lying:LyingConfig does not generate what plain decoding generates: prompt edit-0, token 0" in finished.err


def test_an_honest_acceptance_of_ones_own_passes(bench):
    """The same speculator that commits the best token is measured: the gate looks at tokens, not at hooks."""
    finished = bench("--no-peers", "--speculative-config", HONEST)
    assert finished.code == 0
    assert finished.result["gate"]["lying:LyingConfig"] == {"equal_share": 1.0, "required": "equal", "ties": []}


def test_ties_are_a_matter_of_16_bits(bench, monkeypatch):
    """If every gap were a tie, bfloat16 would pass with the share and the ties reported, and float32 still fail."""
    monkeypatch.setattr(gate, "TIE_TOLERANCE", 10.0)
    finished = bench("--no-peers", "--speculative-config", LYING, "--dtype", "bfloat16")
    assert finished.code == 0
    report = finished.result["gate"]["lying:LyingConfig"]
    assert (report["equal_share"], report["required"], len(report["ties"])) == (0.0, "ties", 3)
    assert all(0 < tie["gap"] < tie["scale"] * 2 for tie in report["ties"])
    assert bench("--no-peers", "--speculative-config", LYING).code == 1


def test_agreement_counts_prompts():
    """The share is of prompts, not of batches."""
    batch = BatchPrompts(kind="chat", ids=("a", "b"), token_ids=((1,), (2,)))
    one = Run(token_ids=((5, 6), (7,)), seconds=1, decode_seconds=1, decode_tokens=1, rounds=2)
    two = Run(token_ids=((5, 6), (8,)), seconds=1, decode_seconds=1, decode_tokens=1, rounds=2)
    assert agreement([batch, batch], [one, one], [one, two]) == 0.75
