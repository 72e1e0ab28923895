"""Capabilities below what a speculator declares: it runs as a chain, says why once, and generates the same."""

from __future__ import annotations

import logging

import pytest
from plain_reference import Tally, check_at_rest
from scripted import scripted
from speculator_fleet import MAX_MODEL_LEN, TREES, Models, workload

from specround import LLM, SpecResources, SpeculatorConfig
from specround.contract import (
    CapabilityError,
    ConfigError,
    LayerDescriptor,
    SpecCapabilities,
    SpecLimit,
    SpeculatorError,
)
from specround.kernels.reference import ReferenceAttention, ReferencePagedCommit

LOGGER = "specround.round.lowering"


class ChainCommit(ReferencePagedCommit):
    """A commit kernel for chains only: as nothing moves in a chain, it must never be called."""

    bound = 0

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        return SpecLimit("chain", "this commit kernel moves nothing")

    def bind(self, resources: SpecResources) -> None:
        type(self).bound += 1

    def __call__(self, *_: object) -> None:
        raise AssertionError("a chain was committed by moving slots")


class TreeAttention(ReferenceAttention):
    """Verifies trees but no masks."""

    def supports(self, layer: LayerDescriptor) -> SpecLimit:
        return SpecLimit("tree", "this attention kernel cannot hide a row")


@pytest.mark.parametrize("name", TREES)
def test_trees_run_as_chains(
    name: str, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a commit kernel for chains only, tree speculators draft chains; tokens stay plain, one line says why."""
    monkeypatch.setattr(
        SpeculatorConfig, "spec_kernel_providers", (lambda: {"layout:paged_token/commit": ChainCommit()},)
    )
    asks = workload(7)[::3]
    with caplog.at_level(logging.WARNING, LOGGER):
        llm = LLM(models.target.path, models.config(name, 7, asks), max_model_len=MAX_MODEL_LEN)
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["this commit kernel moves nothing"]
    assert llm.engine.plan_kind == "chain"
    assert ChainCommit.bound == 0, "paged-token commit is bound above chains only"
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    tally = Tally()
    for ask, output in zip(asks, outputs, strict=True):
        models.target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()
    check_at_rest(llm)
    assert sum(output.metrics.drafted for output in outputs) > 0
    if name == "self_tree":
        assert all(output.metrics.accepted == output.metrics.drafted for output in outputs), "it chains its best path"


def test_masks_run_as_trees(models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An attention kernel without masks turns mask plans into trees."""
    monkeypatch.setattr(
        SpeculatorConfig, "spec_kernel_providers", (lambda: {"attention:full/verify": TreeAttention()},)
    )
    asks = workload(7)[::3]
    with caplog.at_level(logging.WARNING, LOGGER):
        llm = LLM(models.target.path, models.config("adversarial_mask", 7, asks), max_model_len=MAX_MODEL_LEN)
    assert len(caplog.records) == 1
    assert llm.engine.plan_kind == "tree"
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    for ask, output in zip(asks, outputs, strict=True):
        models.target.compare(ask, output.outputs[0].token_ids, Tally())
    assert sum(output.metrics.accepted for output in outputs) > 0


def test_the_speculator_may_adapt_itself(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """adapt_resources decides, within what is left; above it, or above what was declared, it is refused by name."""
    monkeypatch.setattr(
        SpeculatorConfig, "spec_kernel_providers", (lambda: {"layout:paged_token/commit": ChainCommit()},)
    )
    tree = SpecResources(max_candidates=6, max_branching=2)
    log: list = []
    shorter = SpecResources(max_candidates=3)
    LLM(models.target.path, scripted(5, resources=tree, log=log, adapt_resources=lambda *_: shorter))
    calls = [hook for hook, _ in log]
    assert calls == ["declare_resources", "adapt_resources", "create", "bind_resources"]
    assert log[1][1][1] == SpecCapabilities("chain", ("this commit kernel moves nothing",))
    assert log[2][1][0] == tree, "created with the declared resources"
    assert log[3][1] == (shorter,), "bound to the effective ones"
    with pytest.raises((ConfigError, SpeculatorError), match=r"adapt_resources.*at most 'chain'"):
        LLM(models.target.path, scripted(5, resources=tree, adapt_resources=lambda *_: tree))
    longer = SpecResources(max_candidates=9)
    with pytest.raises((ConfigError, SpeculatorError), match=r"adapt_resources.*at most the declared 6"):
        LLM(models.target.path, scripted(5, resources=tree, adapt_resources=lambda *_: longer))


def test_nothing_to_lower_says_nothing(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    """Without limits no line is logged and the declared kind holds."""
    with caplog.at_level(logging.WARNING, LOGGER):
        assert LLM(models.target.path, models.config("adversarial_mask", 3)).engine.plan_kind == "mask"
        assert LLM(models.target.path, models.config("ngram", 3)).engine.plan_kind == "chain"
    assert not caplog.records


def test_a_target_that_verifies_nothing_refuses_speculation(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capability "none": speculation is refused with the reasons, plain decoding still loads."""
    from specround.kernels.registry import KernelRegistry

    nothing = SpecCapabilities("none", ("Mamba1 keeps one state",))
    monkeypatch.setattr(KernelRegistry, "capabilities", lambda *_: nothing)
    with pytest.raises(CapabilityError, match="Mamba1 keeps one state"):
        LLM(models.target.path, models.config("ngram", 3))
    assert LLM(models.target.path).engine.plan_kind is None
