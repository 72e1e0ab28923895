"""`SpeculatorConfig` and `BaseSpeculator`: defaults of every hook, the batch-size schedule, override detection."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.contract import (
    BaseSpeculator,
    BudgetView,
    CapabilityError,
    ConfigError,
    PlanView,
    ProposeView,
    RoundStats,
    SpecCapabilities,
    SpecResources,
    SpeculatorConfig,
    StepObservation,
    VerifyOutput,
    overrides,
)


def budget_view(**changes: int) -> BudgetView:
    values = {
        "num_running": 3,
        "num_waiting": 2,
        "num_free_blocks": 10,
        "num_total_blocks": 20,
        "block_size": 16,
        "num_spec_blocks_held": 0,
        "num_speculative_tokens": 4,
        "max_candidates": 5,
        "step": 7,
    }
    return BudgetView(**(values | changes))


def test_the_budget_view_has_no_defaults() -> None:
    """Every caller fills every field: leaving any one out is an error, and nothing can be changed afterwards."""
    names = [field.name for field in fields(BudgetView)]
    assert names == [
        "num_running",
        "num_waiting",
        "num_free_blocks",
        "num_total_blocks",
        "block_size",
        "num_spec_blocks_held",
        "num_speculative_tokens",
        "max_candidates",
        "step",
    ]
    assert all(field.default is MISSING and field.default_factory is MISSING for field in fields(BudgetView))
    full = dict.fromkeys(names, 1)
    for name in names:
        with pytest.raises(TypeError, match=name):
            BudgetView(**{key: value for key, value in full.items() if key != name})
    with pytest.raises(FrozenInstanceError):
        budget_view().num_running = 1


@pytest.mark.parametrize(
    ("view", "promised"),
    [
        (
            PlanView,
            "req_idx num_computed_tokens root_token_ids max_rows token_history sampling seeds budget",
        ),
        (VerifyOutput, "logits raw_logits row_start root_row"),
        (
            ProposeView,
            "req_idx num_computed_tokens root_token_ids max_rows token_history sampling seeds budget row_start "
            "root_row input_ids positions hidden_states result",
        ),
        (StepObservation, "num_requests num_rows graph_shape num_candidates num_committed"),
        (RoundStats, "step seconds num_candidates num_committed"),
    ],
)
def test_views_carry_what_the_contract_promises(view: type, promised: str) -> None:
    """The named contents may be extended and never renamed, and a hook cannot change what it is shown."""
    assert set(promised.split()) <= {field.name for field in fields(view)}
    assert view.__dataclass_params__.frozen


def test_the_default_config_is_a_chain_of_k() -> None:
    """Without overrides: K + 1 candidates in a chain, budget K + 1, no admission limit, no kernels of its own."""
    config = SpeculatorConfig(num_speculative_tokens=4)
    assert config.declare_resources() == SpecResources(max_candidates=5)
    assert config.candidate_budget(budget_view()) == 5
    assert config.admit_limit(budget_view()) is None
    assert config.spec_kernel_providers == ()
    assert config.round_finished(RoundStats(step=0, seconds=0.1, num_candidates=(1,), num_committed=(1,))) is None
    with pytest.raises(NotImplementedError, match=r"SpeculatorConfig\.create"):
        config.create(SpecResources(max_candidates=5), None, None)
    with pytest.raises(FrozenInstanceError):
        config.num_speculative_tokens = 5


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "4", None, True])
def test_k_is_a_positive_integer(tokens: object) -> None:
    """K below 1 or of another type is refused with field and value."""
    with pytest.raises(ConfigError) as caught:
        SpeculatorConfig(num_speculative_tokens=tokens)
    assert str(caught.value) == f"num_speculative_tokens={tokens!r}: must be an integer >= 1"


@given(st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_the_batch_size_schedule_is_the_default_budget(tokens: int, data: st.DataObject) -> None:
    """The first entry whose range holds the running requests gives its K + 1; outside all entries it is K + 1."""
    entries = st.tuples(st.integers(1, 30), st.integers(0, 10), st.integers(0, tokens))
    schedule = [[first, first + length, k] for first, length, k in data.draw(st.lists(entries, max_size=4))]
    config = SpeculatorConfig(num_speculative_tokens=tokens, num_speculative_tokens_per_batch_size=schedule)
    for running in range(45):
        wanted = [k for first, last, k in schedule if first <= running <= last] or [tokens]
        assert config.candidate_budget(budget_view(num_running=running)) == wanted[0] + 1
    assert hash(config) == hash(SpeculatorConfig(**{f.name: getattr(config, f.name) for f in fields(config)}))


@pytest.mark.parametrize(
    "schedule",
    [3, "1-2:3", [[1, 2]], [[0, 2, 1]], [[3, 2, 1]], [[1, 2, 5]], [[1, 2, -1]], [[1, 2, 1.0]], [[1, 2, True]], [5], {}],
)
def test_schedules_are_checked_by_value(schedule: object) -> None:
    """Entries are three integers with 1 <= first <= last and 0 <= K <= the configured K; the message says so."""
    with pytest.raises(ConfigError) as caught:
        SpeculatorConfig(num_speculative_tokens=4, num_speculative_tokens_per_batch_size=schedule)
    assert caught.value.field == "num_speculative_tokens_per_batch_size"
    assert "[first, last, K] integers with 1 <= first <= last and 0 <= K <= 4" in str(caught.value)


@pytest.mark.parametrize("kind", ["chain", "tree", "mask"])
def test_resources_adapt_to_the_target_by_default(kind: str) -> None:
    """The default lowers declared resources to what the target verifies."""
    declared = SpecResources(max_candidates=8, max_branching=3, custom_mask=True, max_depth=2)
    config = SpeculatorConfig(num_speculative_tokens=7)
    adapted = config.adapt_resources(declared, SpecCapabilities(kind, ("because",)))
    assert adapted == declared.lowered(kind)
    assert adapted.kind == kind


def test_a_target_that_verifies_nothing_refuses_speculation_with_its_reasons() -> None:
    """A Mamba1 layer, for example, is a clear refusal and not a silent speculation-off."""
    config = SpeculatorConfig(num_speculative_tokens=2)
    with pytest.raises(CapabilityError, match="speculative decoding is refused for this model: layer 3 is Mamba1; x"):
        config.adapt_resources(config.declare_resources(), SpecCapabilities("none", ("layer 3 is Mamba1", "x")))


def test_every_speculator_hook_has_a_default_that_does_nothing() -> None:
    """A speculator without overrides is legal: None from plan and accept, nothing from the others."""
    plain = BaseSpeculator()
    assert plain.plan(None) is None
    assert plain.accept(None, None) is None
    for hook, arguments in {
        "bind_resources": 1,
        "request_started": 3,
        "request_finished": 3,
        "observe_step": 1,
        "propose": 1,
        "absorb": 1,
    }.items():
        assert getattr(plain, hook)(*[None] * arguments) is None
        assert not overrides(plain, BaseSpeculator, hook)
    assert plain.capturable


def test_overrides_are_found_in_the_class_its_bases_and_mixins() -> None:
    """A hook counts as overridden wherever in the class hierarchy it was replaced, and only that hook."""

    class Mixin:
        def accept(self, plan: object, output: object) -> None: ...

    class Parent(BaseSpeculator):
        def propose(self, view: object) -> None: ...

    class Child(Mixin, Parent):
        pass

    found = {hook for hook in ("plan", "accept", "observe_step", "propose") if overrides(Child(), BaseSpeculator, hook)}
    assert found == {"accept", "propose"}
    assert not overrides(Parent(), BaseSpeculator, "accept")


def test_overridden_policies_of_a_config_are_found() -> None:
    """The same question about host policies: `admit_limit` is called only when a config overrides it."""

    @dataclass(frozen=True, kw_only=True)
    class Limited(SpeculatorConfig):
        def admit_limit(self, view: BudgetView) -> int:
            return 3

    assert overrides(Limited(num_speculative_tokens=1), SpeculatorConfig, "admit_limit")
    assert not overrides(Limited(num_speculative_tokens=1), SpeculatorConfig, "candidate_budget")
    assert not overrides(SpeculatorConfig(num_speculative_tokens=1), SpeculatorConfig, "admit_limit")
