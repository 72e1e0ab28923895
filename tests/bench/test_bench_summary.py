"""Figures from made-up timings."""

from __future__ import annotations

import pytest

from specround.bench.batches import BatchPrompts
from specround.bench.summary import figures_of, summarise
from specround.bench.timing import measure
from specround.bench.variants import Run


def run(seconds: float, tokens: int = 10, decode_seconds: float | None = None, rounds: int = 5, **counts: int) -> Run:
    decode = seconds / 2 if decode_seconds is None else decode_seconds
    return Run(
        token_ids=((0,) * tokens,),
        seconds=seconds,
        decode_seconds=decode,
        decode_tokens=tokens - 1,
        rounds=rounds,
        **counts,
    )


def test_medians_are_taken_per_batch():
    """One slow repeat of a batch changes the spread, not the rate."""
    figures = figures_of([[run(1.0), run(9.0), run(1.0)], [run(3.0), run(3.0), run(3.0)]])
    assert (figures.tokens, figures.seconds) == (20, 4.0)
    assert figures.tokens_per_s == 5.0
    assert figures.decode_tokens_per_s == 18 / 2.0
    assert figures.spread == (12.0 - 4.0) / 4.0
    assert figures.tokens_per_round == 2.0
    assert figures_of([[run(1.0)]]).spread is None


def test_counts_are_summed_or_unknown():
    """Drafts are summed over batches; where one variant does not count them they are None."""
    figures = figures_of([[run(1.0, drafted=4, accepted=1)], [run(1.0, drafted=6, accepted=3)]])
    assert (figures.drafted, figures.accepted) == (10, 4)
    assert figures_of([[run(1.0)]]).drafted is None


def test_one_token_has_no_decode_rate():
    """With the first token only there is nothing to divide."""
    assert figures_of([[run(1.0, tokens=1, decode_seconds=0.0)]]).decode_tokens_per_s is None


def test_ratios_are_to_the_faster_plain():
    """Each kind is compared with the faster of ours and transformers for that kind, whichever it is."""
    samples = {
        "plain": [[run(2.0)], [run(1.0)]],
        "suffix_tree": [[run(0.5)], [run(1.25)]],
        "transformers": [[run(1.0)], [run(4.0)]],
        "transformers prompt lookup 10": [[run(0.8)], [run(0.1)]],
    }
    roles = dict(zip(samples, ("plain", "speculator", "peer_plain", "peer"), strict=True))
    result = summarise(["edit", "chat"], samples, roles)
    assert [result[scope]["baseline"] for scope in ("edit", "chat", "all")] == ["transformers", "plain", "plain"]
    speedups = {scope: result[scope]["variants"]["suffix_tree"]["speedup"] for scope in result}
    assert speedups == pytest.approx({"edit": 2.0, "chat": 0.8, "all": 3.0 / 1.75})
    assert result["chat"]["variants"]["transformers prompt lookup 10"]["speedup"] == pytest.approx(10.0)
    assert result["edit"]["variants"]["transformers"]["speedup"] == 1.0


def test_decode_ratios_have_their_own_baseline():
    """A plain variant that is slow at prefill but fast at decoding is the baseline of the decode ratio."""
    samples = {
        "plain": [[run(2.0, decode_seconds=0.5)]],
        "ngram": [[run(1.0, decode_seconds=0.25)]],
        "transformers": [[run(1.0, decode_seconds=0.9)]],
    }
    roles = dict(zip(samples, ("plain", "speculator", "peer_plain"), strict=True))
    overall = summarise(["chat"], samples, roles)["all"]
    assert overall["baseline"] == "transformers"
    assert overall["variants"]["ngram"]["speedup"] == 1.0
    assert overall["variants"]["ngram"]["decode_speedup"] == pytest.approx(2.0)


class Recorder:
    role = "plain"

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name, self.calls = name, calls

    def run(self, prompts: tuple[tuple[int, ...], ...]) -> Run:
        self.calls.append((self.name, prompts[0][0]))
        return run(1.0)


def test_variants_take_turns():
    """A batch goes through every variant before the next batch, and each variant comes first in turn."""
    calls: list[tuple[str, int]] = []
    variants = [Recorder(name, calls) for name in "abc"]
    batches = [BatchPrompts(kind="chat", ids=("x",), token_ids=((number,),)) for number in range(2)]
    samples = measure(variants, batches, 3, lambda phase, done, total: None)
    assert [len(samples[name][0]) for name in "abc"] == [3, 3, 3]
    turns = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert ["".join(name for name, _ in turn) for turn in turns] == ["abc", "bca", "bca", "cab", "cab", "abc"]
    assert all(len({batch for _, batch in turn}) == 1 for turn in turns)
