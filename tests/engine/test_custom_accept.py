"""A speculator's own acceptance: any path of committable rows that the tokens agree with, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_reference import Ask, PlainReference, check_at_rest
from scripted import scripted

from specround import LLM, AcceptResult, SpecResources, VerifyPlan
from specround.contract import PlanError, PlanView, SpeculatorError, VerifyOutput

MASK = SpecResources(max_candidates=5, max_branching=3, custom_mask=True)
ASK = Ask((5, 6, 7), 12)


def plan(_: object, view: PlanView) -> VerifyPlan:
    """Root, children 1 and 2, grandchild 3 below 1; column 4, below 2, is a probe that does not see the root."""
    rows = len(view.req_idx)
    mask = torch.eye(5, dtype=torch.bool)
    mask[1, 0] = mask[2, 0] = mask[3, 0] = mask[3, 1] = mask[4, 2] = True
    return VerifyPlan(
        token_ids=torch.tensor([[0, 3, 4, 5, 6]]).repeat(rows, 1),
        num_candidates=view.max_rows.clamp(max=5),
        parents=torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32).repeat(rows, 1),
        mask=mask.repeat(rows, 1, 1),
    )


def result(path: list[int], tokens: list[int]) -> AcceptResult:
    """One request's result."""
    pad = [-1] * (5 - len(path))
    count = torch.tensor([len(path)], dtype=torch.int32)
    return AcceptResult(
        torch.tensor([path + pad], dtype=torch.int32), count, torch.tensor([tokens + [-1] * (5 - len(tokens))])
    )


def accept_with(make: Callable[[VerifyOutput], AcceptResult]) -> Callable[..., AcceptResult | None]:
    """Accept by `make` where the whole plan fits, else let the engine accept."""

    def accept(_: object, plan: VerifyPlan, output: VerifyOutput) -> AcceptResult | None:
        return make(output) if int(plan.num_candidates[0]) == 5 else None

    return accept


def bonus(output: VerifyOutput, column: int) -> int:
    return int(output.logits[int(output.root_row[0]) + column].argmax())


def generate(target: PlainReference, make: Callable[[VerifyOutput], AcceptResult]) -> list[int]:
    llm = LLM(target.path, scripted(4, plan=plan, accept=accept_with(make), resources=MASK))
    tokens = llm.generate(ASK.as_prompt, ASK.params)[0].outputs[0].token_ids
    check_at_rest(llm)
    return tokens


@pytest.mark.parametrize(
    ("path", "drafts"),
    [([0], []), ([0, 1], [3]), ([0, 2], [4]), ([0, 1, 3], [3, 5])],
    ids=lambda v: "-".join(map(str, v)),
)
def test_any_committable_path_is_kept(path: list[int], drafts: list[int], target: PlainReference) -> None:
    """Any path may be kept; its state is what plain decoding of its tokens leaves, so the bonus is right."""
    tokens = generate(target, lambda output: result(path, [*drafts, bonus(output, path[-1])]))
    assert len(tokens) == ASK.max_tokens
    place = 1  # the first token is the prefill's
    while place + len(path) + 4 <= len(tokens):
        assert tokens[place : place + len(drafts)] == drafts
        known = [*ASK.prompt, *tokens[: place + len(drafts)]]
        with torch.no_grad():
            best = int(target.module(input_ids=torch.tensor([known])).logits[0, -1].argmax())
        assert tokens[place + len(drafts)] == best, "the state after the path is not that of its tokens"
        place += len(path)


@pytest.mark.parametrize(
    ("path", "tokens", "message"),
    [
        ([0, 2, 4], [4, 6, 1], "batch place 0, column 2: path=4: must be a committable row, not a probe"),
        ([0, 1], [4, 1], "batch place 0, column 0: token_ids=4: must be the draft of the next column"),
        ([0, 3], [5, 1], "batch place 0, column 1: path=3: must be a child of the column before it"),
        ([0, 1, 2], [3, 4, 1], "path=2: must be a child"),
        ([1], [1], "batch place 0, column 0: path=1: must be 0 at its start"),
        ([0, -1], [3, 1], "batch place 0, column 1: path=-1: must be a used column"),
        ([0, 9], [3, 1], "batch place 0, column 1: path=9: must be a used column"),
        ([0], [24], "batch place 0, column 0: token_ids=24: must be 0 to 23"),
        ([0], [-1], "token_ids=-1"),
        ([], [], "batch place 0: num_committed=0: must be 1 to 5"),
    ],
)
def test_any_other_path_is_refused(path: list[int], tokens: list[int], message: str, target: PlainReference) -> None:
    """Probes, wrong tokens, broken paths and empty ones: the error of hook "accept" names request, place and value."""
    with pytest.raises(SpeculatorError, match=message) as caught:
        generate(target, lambda _: result(path, tokens))
    assert caught.value.hook == "accept"
    assert isinstance(caught.value.__cause__.__cause__, PlanError)


def test_wrong_shapes_and_types_are_refused(target: PlainReference) -> None:
    """A result of another width, inconsistent shapes, or no result at all."""
    wide = AcceptResult(
        torch.zeros(1, 6, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.zeros(1, 6, dtype=torch.int64)
    )
    with pytest.raises(SpeculatorError, match=r"path has shape \(1, 6\): must be \(1, 5\)"):
        generate(target, lambda _: wide)
    with pytest.raises(SpeculatorError, match="AcceptResult shapes"):
        generate(target, lambda _: AcceptResult(torch.zeros(1, 5), torch.ones(2), torch.zeros(1, 5)))
    with pytest.raises(SpeculatorError, match="AttributeError"):
        generate(target, lambda _: (0, 1))


def test_none_means_built_in_acceptance(target: PlainReference) -> None:
    """Overriding accept and answering None changes nothing."""
    llm = LLM(target.path, scripted(4, plan=plan, resources=MASK))
    assert tuple(llm.generate(ASK.as_prompt, ASK.params)[0].outputs[0].token_ids) == target.answers([ASK])[0]
