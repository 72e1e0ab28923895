"""The identity tests would notice: with one part of the round broken on purpose, tokens change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from speculator_fleet import MAX_MODEL_LEN, Models, workload
from torch import Tensor

from specround import LLM, AcceptResult, SpeculatorConfig, VerifyPlan
from specround.kernels.acceptance import naive
from specround.round import PlanLayout, RoundBatch, layout, spec_round


def count_wrong(models: Models, name: str, temperature: float, breaker: Any = None) -> int:
    """Requests whose tokens are not the plain ones."""
    asks = [ask for ask in workload(7) if ask.temperature == temperature and ask.max_tokens > 2]
    config = models.config(name, 7, asks)
    llm = LLM(models.target.path, config, max_model_len=MAX_MODEL_LEN, max_num_seqs=32, block_size=4)
    if breaker is not None:
        breaker(llm)
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    answers = models.target.answers(asks)
    return sum(tuple(o.outputs[0].token_ids) != answer for o, answer in zip(outputs, answers, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["adversarial", "adversarial_mask", "self_tree"])
def test_whole_rounds_are_right(name: str, temperature: float, models: Models) -> None:
    """The control of the controls: nothing broken, nothing wrong."""
    assert count_wrong(models, name, temperature) == 0


@pytest.mark.parametrize("name", ["adversarial", "adversarial_mask", "self_tree"])
def test_without_commit(name: str, models: Models) -> None:
    """KV of accepted paths left where the tree had it: later tokens attend to wrong keys."""

    def breaker(llm: LLM) -> None:
        llm.engine.core.runner.round._commit_kernel = lambda *_: None

    assert count_wrong(models, name, 0.0, breaker) > 2


@pytest.mark.parametrize("name", ["adversarial", "self_tree"])
def test_without_tree_mask(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that see every earlier column instead of their ancestors."""
    original = layout._topology

    def causal(plan: VerifyPlan) -> tuple[Any, ...]:
        tables, visible, depth, committable = original(plan)
        if visible is not None:
            columns = torch.arange(plan.num_columns)
            visible = ((2 << columns) - 1).expand_as(visible)
        return tables, visible, depth, committable

    monkeypatch.setattr(layout, "_topology", causal)
    assert count_wrong(models, name, 0.0) > 2


@pytest.mark.parametrize("name", ["adversarial", "self_tree"])
def test_with_row_numbers_for_depths(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions by row number instead of depth."""
    original = layout._topology

    def flat(plan: VerifyPlan) -> tuple[Any, ...]:
        tables, visible, depth, committable = original(plan)
        if depth is not None:
            depth = torch.arange(plan.num_columns).expand_as(depth)
        return tables, visible, depth, committable

    monkeypatch.setattr(layout, "_topology", flat)
    assert count_wrong(models, name, 0.0) > 2


@pytest.mark.parametrize("name", ["adversarial", "self_draft", "ngram"])
def test_with_the_bonus_of_the_root(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus taken from the root's row instead of the last row of the path."""
    original = naive._result

    def wrong(path: Tensor, num_committed: Tensor, drawn: Tensor) -> AcceptResult:
        result = original(path, num_committed, drawn)
        last = (num_committed.to(torch.int64) - 1).clamp(min=0)[:, None]
        kept = num_committed[:, None] > 0
        bonus = torch.where(kept, drawn[:, :1], result.token_ids.gather(1, last))
        return replace(result, token_ids=result.token_ids.scatter(1, last, bonus))

    monkeypatch.setattr(naive, "_result", wrong)
    assert count_wrong(models, name, 0.0) > 2


def _noise_by_row(plan: VerifyPlan, batch: RoundBatch) -> PlanLayout:
    made = layout.lay_out(plan, batch)
    columns = made.logits_rows - batch.root_row.to(torch.int64)[made.logits_batch_idx]
    return replace(made, token_index=batch.root_position[made.logits_batch_idx] + columns + 1)


@pytest.mark.parametrize("name", ["adversarial", "self_tree"])
def test_with_noise_by_row(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise keyed by row number instead of token index: sampled text changes, greedy text does not."""
    monkeypatch.setattr(spec_round, "lay_out", _noise_by_row)
    assert count_wrong(models, name, 0.8) > 2
    assert count_wrong(models, name, 0.0) == 0


def test_with_one_seed_for_all(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of another request's seed: the seeds are really used."""

    def breaker(llm: LLM) -> None:
        start = llm.engine.core.runner.state.start
        monkeypatch.setattr(
            llm.engine.core.runner.state, "start", lambda started, up: start(replace(started, seed=5), up)
        )

    assert count_wrong(models, "ngram", 0.8, breaker) > 2


def test_a_drafter_that_does_not_absorb(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without absorb at budget 1 the self-drafter's cache has gaps: it no longer agrees with its target."""
    from specround.speculators.draft_model import DraftModelSpeculator

    absorb, propose = DraftModelSpeculator.absorb, DraftModelSpeculator.propose

    def rejected(skip: bool) -> int:
        budgets = iter([8, 1, 1] * 1000)
        with monkeypatch.context() as patch:
            patch.setattr(SpeculatorConfig, "candidate_budget", lambda self, view: next(budgets))
            if skip:
                patch.setattr(
                    DraftModelSpeculator, "absorb", lambda self, view: absorb(self, view) if view.budget > 1 else None
                )
                patch.setattr(DraftModelSpeculator, "propose", propose)
            asks = workload(7)[::2]
            llm = LLM(models.target.path, models.config("self_draft", 7), max_model_len=MAX_MODEL_LEN)
            outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
        return sum(output.metrics.drafted - output.metrics.accepted for output in outputs)

    assert rejected(skip=False) == 0
    assert rejected(skip=True) > 0
