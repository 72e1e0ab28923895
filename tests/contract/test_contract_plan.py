"""`VerifyPlan`, `AcceptResult` and the helpers that cut plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.contract import (
    MAX_TREE_COLUMNS,
    PLAN_KINDS,
    AcceptResult,
    PlanError,
    VerifyPlan,
    min_kind,
    slice_plan,
    trim_draft_tokens,
)

FIELDS = ("parents", "positions", "mask")


def plan_of(rows: int, columns: int, *fields: str) -> VerifyPlan:
    """A plan with the named optional fields, every value distinct enough to recognise slices."""
    shapes = {"parents": (rows, columns), "positions": (rows, columns), "mask": (rows, columns, columns)}
    given_fields = {
        name: (torch.arange(torch.Size(shapes[name]).numel()).reshape(shapes[name]) % 7).to(
            torch.bool if name == "mask" else torch.int32
        )
        for name in fields
    }
    return VerifyPlan(
        token_ids=torch.arange(rows * columns).reshape(rows, columns),
        num_candidates=torch.arange(rows, dtype=torch.int32) % (columns + 1),
        **given_fields,
    )


@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
def test_the_kind_is_decided_by_which_fields_are_present(present: tuple[bool, bool, bool]) -> None:
    """A mask or positions make a mask plan, else parents make a tree, else it is a chain; values are not looked at."""
    fields = [name for name, there in zip(FIELDS, present, strict=True) if there]
    wanted = "mask" if "mask" in fields or "positions" in fields else "tree" if "parents" in fields else "chain"
    plan = plan_of(2, 3, *fields)
    assert plan.kind == wanted
    assert (plan.num_requests, plan.num_columns) == (2, 3)


def test_a_chain_shaped_tree_is_a_tree() -> None:
    """The kind is known on the host without reading parents."""
    parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
    assert VerifyPlan(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), parents).kind == "tree"


def test_kinds_are_ordered() -> None:
    """None < chain < tree < mask, and the minimum of kinds follows that order."""
    assert PLAN_KINDS == ("none", "chain", "tree", "mask")
    for a, b in product(PLAN_KINDS, repeat=2):
        assert min_kind(a, b) == PLAN_KINDS[min(PLAN_KINDS.index(a), PLAN_KINDS.index(b))]


@pytest.mark.parametrize(
    ("field", "shape", "allowed"),
    [
        ("num_candidates", (3,), r"\(2,\)"),
        ("num_candidates", (2, 1), r"\(2,\)"),
        ("parents", (2, 4), r"\(2, 5\)"),
        ("parents", (5,), r"\(2, 5\)"),
        ("positions", (1, 5), r"\(2, 5\)"),
        ("mask", (2, 5), r"\(2, 5, 5\)"),
        ("mask", (2, 5, 4), r"\(2, 5, 5\)"),
    ],
)
def test_wrong_shapes_name_field_shape_and_what_is_allowed(field: str, shape: tuple[int, ...], allowed: str) -> None:
    """Shapes that disagree with token_ids are refused with the field, its shape and the right one."""
    fields = {"token_ids": torch.zeros(2, 5, dtype=torch.int64), "num_candidates": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(PlanError, match=rf"{field} has shape .*{len(shape) and shape[0]}.*: must be {allowed}"):
        VerifyPlan(**(fields | {field: torch.zeros(shape)}))


def test_token_ids_must_be_a_matrix() -> None:
    """A flat token list is refused before anything else is compared with it."""
    with pytest.raises(PlanError, match=r"token_ids has shape \(4,\): must be \[R, C\]"):
        VerifyPlan(torch.zeros(4), torch.zeros(1))


@pytest.mark.parametrize("fields", [("parents",), ("positions",), ("mask",)])
def test_trees_and_masks_have_at_most_64_columns(fields: tuple[str, ...]) -> None:
    """64 columns are legal and 65 are not; chains are not limited; no plan is without its root column."""
    assert plan_of(1, MAX_TREE_COLUMNS, *fields).num_columns == MAX_TREE_COLUMNS == 64
    with pytest.raises(PlanError, match=r"has 65 columns: must be 1 to 64"):
        plan_of(1, 65, *fields)
    assert plan_of(1, 65).kind == "chain"
    with pytest.raises(PlanError, match=r"has 0 columns: must be 1 to 64"):
        VerifyPlan(torch.zeros(1, 0), torch.zeros(1), torch.zeros(1, 0))
    with pytest.raises(PlanError, match=r"a chain plan has 0 columns: must be at least 1"):
        VerifyPlan(torch.zeros(1, 0), torch.zeros(1))


@given(
    st.integers(0, 6),
    st.integers(1, 9),
    st.sets(st.sampled_from(FIELDS)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_slices_are_views_of_every_field(rows: int, columns: int, fields: set[str], cut: tuple[int, int]) -> None:
    """Requests start..stop of each present field, sharing memory; absent fields stay absent, so the kind stays."""
    start, stop = min(*cut, rows), min(max(cut), rows)
    plan = plan_of(rows, columns, *fields)
    part = slice_plan(plan, start, stop)
    assert part.kind == plan.kind
    for name in ("token_ids", "num_candidates", *FIELDS):
        whole, piece = getattr(plan, name), getattr(part, name)
        assert (whole is None) == (piece is None)
        if whole is not None:
            assert torch.equal(piece, whole[start:stop])
            assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_slices_side_by_side_give_the_plan_again() -> None:
    """Concatenated slices are the plan; a slice that drops positions or mask is of another kind (control)."""
    plan = plan_of(5, 4, *FIELDS)
    parts = [slice_plan(plan, 0, 2), slice_plan(plan, 2, 2), slice_plan(plan, 2, 5)]
    for name in ("token_ids", "num_candidates", *FIELDS):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(plan, name))
    assert replace(parts[0], positions=None, mask=None).kind != plan.kind


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4), (4, 4), (-2, -1)])
def test_slices_outside_the_plan_are_refused(start: int, stop: int) -> None:
    """Python's forgiving slices would return other requests; the helper refuses, naming range and size."""
    with pytest.raises(PlanError, match=rf"slice {start}:{stop} is outside a plan of 3 requests"):
        slice_plan(plan_of(3, 2), start, stop)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_trimming_keeps_at_most_the_drafts_asked_for(counts: list[int], data: st.DataObject) -> None:
    """min(candidates, drafts + 1) by int or by tensor; roots stay, requests without candidates stay without."""
    plan = VerifyPlan(torch.zeros(len(counts), 8, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32))
    drafts = data.draw(st.lists(st.integers(0, 10), min_size=len(counts), max_size=len(counts)))
    by_tensor = trim_draft_tokens(plan, torch.tensor(drafts))
    by_int = trim_draft_tokens(plan, drafts[0])
    assert by_tensor.num_candidates.tolist() == [min(n, d + 1) for n, d in zip(counts, drafts, strict=True)]
    assert by_int.num_candidates.tolist() == [min(n, drafts[0] + 1) for n in counts]
    for trimmed in (by_tensor, by_int):
        assert trimmed.num_candidates.dtype == torch.int32
        assert trimmed.token_ids is plan.token_ids
        assert trimmed.kind == "chain"
    assert plan.num_candidates.tolist() == counts


@pytest.mark.parametrize("fields", [("parents",), ("mask",), ("positions",)])
def test_only_chains_are_trimmed(fields: tuple[str, ...]) -> None:
    """Cutting a tree by columns would keep an arbitrary part of it."""
    kind = plan_of(1, 3, *fields).kind
    with pytest.raises(PlanError, match=f"was given a {kind} plan: must be a chain"):
        trim_draft_tokens(plan_of(1, 3, *fields), 1)


def test_trimming_below_zero_drafts_is_refused() -> None:
    """A negative int would drop the root, which no plan may lose."""
    with pytest.raises(PlanError, match=r"num_drafts=-1: must be an integer >= 0"):
        trim_draft_tokens(plan_of(2, 3), -1)


def test_plans_keep_the_buffers_they_are_given() -> None:
    """Nothing is copied, so a captured graph can replay a plan after its buffers were refilled."""
    tokens, count = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])
    plan = VerifyPlan(tokens, count)
    assert plan.token_ids is tokens
    assert plan.num_candidates is count
    with pytest.raises(AttributeError):
        plan.token_ids = tokens


@pytest.mark.parametrize(
    ("path", "count", "tokens"),
    [((2, 3), (3,), (2, 3)), ((2, 3), (2,), (2, 4)), ((6,), (2,), (6,)), ((2, 3), (), (2, 3))],
)
def test_accept_results_check_their_shapes(path: tuple, count: tuple, tokens: tuple) -> None:
    """Path and token_ids are [R, C] and num_committed is [R]; the error shows all three shapes."""
    with pytest.raises(PlanError, match=r"AcceptResult shapes path .*token_ids .*num_committed .*must be \[R, C\]"):
        AcceptResult(torch.zeros(path), torch.zeros(count), torch.zeros(tokens))
    assert AcceptResult(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3)).path.shape == (2, 3)
