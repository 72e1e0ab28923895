"""The kernel provider example: its kernel runs, is announced once, and lowers the speculator where it declines."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kernel_provider import Float64Attention, float64_attention
from plain_reference import Ask, PlainReference, Tally

from specround import LLM
from specround.contract import LayerDescriptor, SpecLimit, SpecResources
from specround.kernels.reference import ReferenceAttention
from tiny_models import tiny_model

CONFIG = {"method": "float64", "num_speculative_tokens": 12, "suffix_decoding_max_spec_factor": 4.0}
ASKS = [Ask((3, 4, 5, 6, 3, 4, 5, 6, 3), 20), Ask((9,), 16), Ask((7, 8, 9, 7, 8, 9), 20, 0.8, seed=3)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each kernel class, and bindings of ours."""
    found: Counter[str] = Counter()
    for cls in (Float64Attention, ReferenceAttention):
        original = cls.__call__

        def call(self: Any, *args: Any, name: str = cls.__name__, original: Any = original, **values: Any) -> Any:
            found[name] += 1
            return original(self, *args, **values)

        monkeypatch.setattr(cls, "__call__", call)
    monkeypatch.setattr(Float64Attention, "bind", lambda _, resources: found.update([resources.kind]))
    return found


def test_the_same_text_from_another_kernel(
    target: PlainReference, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Trees are verified by the provider's kernel alone, bound once; one line announces it; tokens stay plain."""
    target.answers(ASKS)
    calls.clear()
    with caplog.at_level(logging.INFO, logger="specround"):
        llm = LLM(target.path, CONFIG)
        outputs = llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["kernel attention:full/verify: float64_attention overrides ReferenceAttention"]
    assert llm.engine.plan_kind == "tree"
    assert calls["tree"] == 1
    assert calls["Float64Attention"] > 10
    assert calls["ReferenceAttention"] == 0
    tally = Tally()
    for ask, output in zip(ASKS, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()
    assert sum(output.metrics.accepted for output in outputs) > 0


def test_declining_a_layer_chains_the_speculator(
    tmp_path: Path, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 2 caps its scores, which the kernel declines: a chain, the reason in one line, the same text."""
    path = str(tiny_model(tmp_path / "gemma2", "gemma2"))
    prompts, params = [ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS]
    plain = [output.outputs[0].token_ids for output in LLM(path).generate(prompts, params)]
    with caplog.at_level(logging.WARNING, logger="specround"):
        llm = LLM(path, CONFIG)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the target verifies at most a chain, not a tree: float64 attention lacks a soft cap"]
    assert llm.engine.plan_kind == "chain"
    calls.clear()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == plain
    assert calls["Float64Attention"] == 0, "a layer that it declines keeps the built-in kernel"
    assert calls["ReferenceAttention"] > 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, ""),
        ({"has_sinks": True}, "float64 attention lacks sinks"),
        ({"window": 4, "softcap": 3.0}, "float64 attention lacks a soft cap, a window"),
        ({"features": frozenset({"alibi"})}, "float64 attention lacks alibi"),
    ],
)
def test_supports(fields: dict[str, Any], reason: str) -> None:
    """It verifies masks, or declines and says what it lacks."""
    kernel = float64_attention()["attention:full/verify"]
    kernel.bind(SpecResources(max_candidates=4))
    layer = LayerDescriptor(name="layer", verify_key="attention:full/verify", **fields)
    assert kernel.supports(layer) == (SpecLimit("none", reason) if reason else SpecLimit("mask"))
