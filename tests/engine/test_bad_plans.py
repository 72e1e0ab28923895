"""Plans that break the contract are refused by name: request, column, values; never laid out, never rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain_reference import Ask, PlainReference
from scripted import scripted

from specround import LLM, SpecResources, VerifyPlan
from specround.contract import PlanError, PlanView, SpeculatorError

ASKS = [Ask((5, 6, 7), 10), Ask((8, 9), 10)]
TREE = SpecResources(max_candidates=6, max_branching=2, max_depth=3)
MASK = replace(TREE, custom_mask=True)
CHAIN = SpecResources(max_candidates=6)


def legal(view: PlanView) -> VerifyPlan:
    """Root, two children, and a grandchild under the second one, as far as the rows reach."""
    rows = len(view.req_idx)
    return VerifyPlan(
        token_ids=torch.tensor([[0, 3, 4, 5, -1, -1]]).repeat(rows, 1),
        num_candidates=view.max_rows.clamp(max=4),
        parents=torch.tensor([[-1, 0, 0, 2, -1, -1]], dtype=torch.int32).repeat(rows, 1),
    )


def with_values(field: str, column: int, value: int) -> Callable[[VerifyPlan], VerifyPlan]:
    def change(plan: VerifyPlan) -> VerifyPlan:
        getattr(plan, field)[1, column] = value
        return plan

    return change


def with_count(value: int) -> Callable[[VerifyPlan], VerifyPlan]:
    def change(plan: VerifyPlan) -> VerifyPlan:
        plan.num_candidates[1] = value
        return plan

    return change


def deep(plan: VerifyPlan) -> VerifyPlan:
    plan.parents[1] = torch.tensor([-1, 0, 1, 2, 3, 4])
    plan.token_ids[1] = 3
    plan.num_candidates[1] = 5
    return plan


def wide(plan: VerifyPlan) -> VerifyPlan:
    plan.parents[1, 3] = 0
    return plan


def more_columns(plan: VerifyPlan) -> VerifyPlan:
    wider = torch.nn.functional.pad(plan.token_ids, (0, 1), value=-1)
    return VerifyPlan(wider, plan.num_candidates, torch.nn.functional.pad(plan.parents, (0, 1), value=-1))


def fewer_requests(plan: VerifyPlan) -> VerifyPlan:
    return VerifyPlan(plan.token_ids[:1], plan.num_candidates[:1], plan.parents[:1])


def with_mask(plan: VerifyPlan) -> VerifyPlan:
    rows, columns = plan.token_ids.shape
    return replace(plan, mask=torch.ones(rows, columns, columns, dtype=torch.bool))


def with_positions(plan: VerifyPlan, value: int = 0) -> VerifyPlan:
    positions = torch.zeros_like(plan.token_ids, dtype=torch.int32)
    positions[1, 2] = value
    return replace(plan, positions=positions)


def one_row_for_all(plan: VerifyPlan) -> VerifyPlan:
    return replace(plan, parents=plan.parents[:1].expand_as(plan.parents))


FAULTS = {
    "parent at the own column": (TREE, with_values("parents", 3, 3), "batch place 1, column 3: parents=3"),
    "parent past the own column": (TREE, with_values("parents", 2, 5), "batch place 1, column 2: parents=5"),
    "no parent": (TREE, with_values("parents", 2, -1), "batch place 1, column 2: parents=-1"),
    "token out of the vocabulary": (TREE, with_values("token_ids", 2, 24), "batch place 1, column 2: token_ids=24"),
    "unused token in a used column": (TREE, with_values("token_ids", 1, -1), "batch place 1, column 1: token_ids=-1"),
    "negative token": (TREE, with_values("token_ids", 3, -7), "batch place 1, column 3: token_ids=-7"),
    "too many rows": (TREE, with_count(7), "batch place 1: num_candidates=7: must be 1 to 6"),
    "no root": (TREE, with_count(0), "batch place 1: num_candidates=0: must be 1 to 6"),
    "negative count": (TREE, with_count(-1), "batch place 1: num_candidates=-1"),
    "too deep": (TREE, deep, "batch place 1, column 4: depth=4: must be at most 3"),
    "too many children": (TREE, wide, "batch place 1, column 0: children=3: must be at most max_branching=2"),
    "too many columns": (TREE, more_columns, "7 columns: at most 6"),
    "too few requests": (TREE, fewer_requests, "1 requests: this step has 2"),
    "a tree where chains are verified": (CHAIN, lambda plan: plan, "a tree plan: .* at most a chain"),
    "a mask where trees are verified": (TREE, with_mask, "a mask plan: .* at most a tree"),
    "positions where trees are verified": (TREE, with_positions, "a mask plan: .* at most a tree"),
    "negative position": (MASK, lambda plan: with_positions(plan, -3), "batch place 1, column 2: positions=-3"),
    "one row shared by all requests": (TREE, one_row_for_all, "parents is a broadcast view"),
    "wrong shape": (
        TREE,
        lambda plan: replace(plan, num_candidates=plan.num_candidates[:1]),
        "num_candidates has shape",
    ),
    "mask of another shape": (MASK, lambda plan: replace(plan, mask=torch.ones(2, 6, 5)), "mask has shape"),
    "no plan at all": (TREE, lambda plan: "plan", "AttributeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_refused(name: str, target: PlainReference) -> None:
    """Each fault is a SpeculatorError of hook "plan" that carries the PlanError; blocks are returned."""
    resources, spoil, message = FAULTS[name]

    def plan(_: object, view: PlanView) -> VerifyPlan | None:
        if resources is CHAIN:
            return None if int(view.max_rows.max()) < 4 else legal(view)
        return spoil(legal(view)) if int(view.max_rows.min()) >= 4 else legal(view)

    llm = LLM(target.path, scripted(5, plan=plan, resources=resources))
    with pytest.raises(SpeculatorError, match=message) as caught:
        llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS], request_ids=["a", "b"])
    assert (caught.value.hook, sorted(caught.value.request_ids)) == ("plan", ["a", "b"])
    if name != "no plan at all":
        assert isinstance(caught.value.__cause__.__cause__, PlanError)
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_total


@pytest.mark.parametrize("resources", [TREE, MASK], ids=["tree", "mask"])
def test_the_plan_itself_is_legal(resources: SpecResources, target: PlainReference) -> None:
    """The control: unspoilt, the same plan runs and changes no token."""
    llm = LLM(target.path, scripted(5, plan=lambda _, view: legal(view), resources=resources))
    outputs = llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == target.answers(ASKS)
    assert sum(output.metrics.drafted for output in outputs) > 0


def test_unused_columns_and_the_root_column_are_not_read(target: PlainReference) -> None:
    """Garbage past the used prefix and in column 0 is legal: the engine writes the one and ignores the other."""

    def plan(_: object, view: PlanView) -> VerifyPlan:
        made = legal(view)
        made.token_ids[:, 4:] = 10**6
        made.token_ids[:, 0] = -99
        made.parents[:, 4:] = 60
        made.parents[:, 0] = 5
        return made

    llm = LLM(target.path, scripted(5, plan=plan, resources=TREE))
    outputs = llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == target.answers(ASKS)
