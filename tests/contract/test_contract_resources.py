"""`SpecResources`, `DraftLayer`, `SpecLimit`, `SpecCapabilities`: value checks, lowering, reduction over ranks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.contract import (
    PLAN_KINDS,
    ConfigError,
    DraftLayer,
    SpecCapabilities,
    SpecLimit,
    SpecResources,
    min_kind,
)

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_candidates", 0, "an integer >= 1"),
        ("max_candidates", "4", "an integer >= 1"),
        ("max_candidates", True, "an integer >= 1"),
        ("max_branching", 0, "an integer >= 1"),
        ("max_branching", 1.5, "an integer >= 1"),
        ("max_depth", -1, "0 to max_candidates - 1 = 3"),
        ("max_depth", 4, "0 to max_candidates - 1 = 3"),
        ("max_depth", 1.5, "0 to max_candidates - 1 = 3"),
        ("candidate_shapes", (0, 2), "a tuple of integers of 1 to 4"),
        ("candidate_shapes", (5,), "a tuple of integers of 1 to 4"),
        ("candidate_shapes", [2], "a tuple of integers of 1 to 4"),
        ("drafting", "gpu", "'device' or 'host'"),
        ("hidden_states", "all", "'none', 'last' or a tuple of layer indices >= 0"),
        ("hidden_states", (), "'none', 'last' or a tuple of layer indices >= 0"),
        ("hidden_states", (3, -1), "'none', 'last' or a tuple of layer indices >= 0"),
        ("hidden_states", [3], "'none', 'last' or a tuple of layer indices >= 0"),
    ],
)
def test_resources_refuse_a_value_by_field_value_and_what_is_allowed(field: str, value: object, allowed: str) -> None:
    """Each out-of-range field is a ConfigError that carries field, value and allowed, and shows all three."""
    with pytest.raises(ConfigError) as caught:
        SpecResources(**({"max_candidates": 4} | {field: value}))
    assert (caught.value.field, caught.value.value, caught.value.allowed) == (field, value, allowed)
    assert str(caught.value) == f"{field}={value!r}: must be {allowed}"


def test_trees_and_masks_are_limited_to_64_candidates_and_chains_are_not() -> None:
    """Ancestor sets are two 32-bit words."""
    for tree in ({"max_branching": 2}, {"custom_mask": True}):
        assert SpecResources(max_candidates=64, **tree).max_candidates == 64
        with pytest.raises(ConfigError, match="max_candidates=65: must be at most 64 for trees and masks"):
            SpecResources(max_candidates=65, **tree)
    assert SpecResources(max_candidates=65).kind == "chain"


def test_resources_are_frozen_and_hashable() -> None:
    """Declared once: nothing can change them later, and they can key a cache."""
    resources = SpecResources(max_candidates=4, candidate_shapes=(1, 4), hidden_states=(2, 5, 8))
    with pytest.raises(FrozenInstanceError):
        resources.max_candidates = 5
    assert hash(resources) == hash(SpecResources(max_candidates=4, candidate_shapes=(1, 4), hidden_states=(2, 5, 8)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 0}, "draft layer 'd'.num_kv_heads=0: must be an integer >= 1"),
        ({"head_dim": -4}, "draft layer 'd'.head_dim=-4: must be an integer >= 1"),
        ({"head_dim": 2.0}, "draft layer 'd'.head_dim=2.0: must be an integer >= 1"),
        ({"window": 0}, "draft layer 'd'.window=0: must be an integer >= 1 or None"),
    ],
)
def test_draft_layers_name_themselves_in_errors(fields: dict[str, object], message: str) -> None:
    """A drafter may declare many layers, so the message says which one is wrong."""
    with pytest.raises(ConfigError) as caught:
        DraftLayer(**({"name": "d", "num_kv_heads": 2, "head_dim": 4} | fields))
    assert str(caught.value) == message


def test_draft_layers_have_unique_names() -> None:
    """`DraftHost.attend` finds a layer by name, so two of a name are refused."""
    layers = tuple(DraftLayer(name=name, num_kv_heads=1, head_dim=4) for name in ("a", "b", "a"))
    assert SpecResources(max_candidates=2, draft_layers=layers[:2]).draft_layers == layers[:2]
    with pytest.raises(ConfigError, match=r"draft_layers=.*: must be layers with unique names"):
        SpecResources(max_candidates=2, draft_layers=layers)


@st.composite
def resources(draw: st.DrawFn) -> SpecResources:
    """Any legal resources up to 64 candidates."""
    candidates = draw(st.integers(1, 64))
    return SpecResources(
        max_candidates=candidates,
        max_branching=draw(st.integers(1, 4)),
        custom_mask=draw(st.booleans()),
        max_depth=draw(st.one_of(st.none(), st.integers(0, candidates - 1))),
        candidate_shapes=tuple(draw(st.lists(st.integers(1, candidates), max_size=3))),
        hidden_states=draw(st.sampled_from(["none", "last", (1, 2)])),
        drafting=draw(st.sampled_from(["device", "host"])),
    )


@given(resources())
@PROPERTY
def test_kind_and_depth_limit_follow_the_fields(declared: SpecResources) -> None:
    """A custom mask is above branching, branching above a chain; without a depth the tree may be a chain of K."""
    wanted = "mask" if declared.custom_mask else "tree" if declared.max_branching > 1 else "chain"
    assert declared.kind == wanted
    assert declared.depth_limit == (declared.max_candidates - 1 if declared.max_depth is None else declared.max_depth)


@given(resources(), st.sampled_from(["chain", "tree", "mask"]))
@PROPERTY
def test_lowering_never_exceeds_the_kind_and_keeps_the_length(declared: SpecResources, kind: str) -> None:
    """Lowering to a kind at or above the own one changes nothing; below, only what the kind forbids goes.

    A tree becomes a chain of the same length: as many candidates, as deep as they reach. Lowering twice is lowering
    once.
    """
    lowered = declared.lowered(kind)
    assert PLAN_KINDS.index(lowered.kind) <= PLAN_KINDS.index(kind)
    if PLAN_KINDS.index(kind) >= PLAN_KINDS.index(declared.kind):
        assert lowered is declared
    if kind == "chain" and declared.kind != "chain":
        assert lowered.depth_limit == declared.max_candidates - 1
    if kind == "tree" and declared.kind == "mask":
        assert lowered.max_branching == declared.max_branching
        assert lowered.depth_limit == declared.depth_limit
    for name in ("max_candidates", "candidate_shapes", "hidden_states", "drafting", "draft_layers"):
        assert getattr(lowered, name) == getattr(declared, name)
    assert lowered.lowered(kind) == lowered


@pytest.mark.parametrize("kind", ["none", "forest"])
def test_there_is_nothing_to_lower_to_below_a_chain(kind: str) -> None:
    """`none` and unknown kinds are refused with the kinds that exist."""
    with pytest.raises(ConfigError, match=f"plan kind='{kind}': must be 'chain', 'tree' or 'mask'"):
        SpecResources(max_candidates=2).lowered(kind)


@pytest.mark.parametrize(
    ("kind", "reason", "message"),
    [
        ("forest", "x", "kind='forest': must be one of none, chain, tree, mask"),
        ("chain", "", "reason='': must be given for a limit of 'chain'"),
        ("none", "", "reason='': must be given for a limit of 'none'"),
        ("mask", "x", "reason='x': must be empty for a limit of 'mask'"),
    ],
)
def test_limits_below_mask_give_a_reason(kind: str, reason: str, message: str) -> None:
    """Every lowering can be logged with its reason, and the top kind lowers nothing."""
    with pytest.raises(ConfigError) as caught:
        SpecLimit(kind, reason)
    assert str(caught.value) == message
    with pytest.raises(ConfigError, match="kind='forest'"):
        SpecCapabilities("forest")


LIMITS = st.lists(
    st.sampled_from(PLAN_KINDS).flatmap(
        lambda kind: (
            st.just(SpecLimit("mask"))
            if kind == "mask"
            else st.sampled_from("abc").map(lambda reason: SpecLimit(kind, reason))
        )
    ),
    max_size=6,
)


@given(LIMITS)
@PROPERTY
def test_capabilities_are_the_minimum_with_every_reason_once(limits: list[SpecLimit]) -> None:
    """A rank verifies the lowest kind of its layers; reasons keep their order and do not repeat."""
    found = SpecCapabilities.from_limits(limits)
    assert found.kind == min_kind("mask", *(limit.kind for limit in limits))
    wanted: list[str] = []
    for limit in limits:
        if limit.kind != "mask" and limit.reason not in wanted:
            wanted.append(limit.reason)
    assert list(found.reasons) == wanted


@given(st.lists(LIMITS, max_size=5))
@PROPERTY
def test_reducing_ranks_equals_one_rank_with_all_layers(ranks: list[list[SpecLimit]]) -> None:
    """Reports of several ranks reduce to what a single rank with all their layers would report, in any grouping."""
    together = SpecCapabilities.from_limits([limit for rank in ranks for limit in rank])
    reports = [SpecCapabilities.from_limits(rank) for rank in ranks]
    assert SpecCapabilities.reduce(reports) == together
    pairwise = SpecCapabilities.reduce([])
    for report in reports:
        pairwise = SpecCapabilities.reduce([pairwise, report])
    assert pairwise == together
