"""Identity and state equality for every recurrent architecture: chains, trees, both state modes, all speculators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrid_reference import Hybrids
from hybrid_rounds import TOLERANCE, Case, axes_of, run_case

import specround.round.state_layout as state_layout_module
from covering import covering_array, full_product, pairs_in, pairs_of
from specround.contract import AcceptResult
from specround.kernels.reference_states import ReferenceStateCommit
from specround.models.families import FAMILIES

RECURRENT = sorted(name for name, family in FAMILIES.items() if family.recurrent and family.verifies != "none")
COVERING = [Case(**values) for values in covering_array(axes_of(RECURRENT))]
FULL = [Case(**values) for values in full_product(axes_of(RECURRENT))]
CONTROLLED = ("falcon_h1", "kimi_linear", "lfm2", "mamba2", "qwen3_5_text")
"""One type for each kind of state, and one whose blocks have attention beside it."""


def name_of(case: Case) -> str:
    values = (case.model_type, case.kind, case.state_mode, f"b{case.block_size}", f"k{case.drafts}")
    last = (f"t{case.temperature}", f"n{case.token_budget}", "late" if case.late else "prompt")
    return "-".join([*values, *last]).replace(" ", "_")


def check(hybrids: Hybrids, case: Case, drafter: str) -> None:
    answers, outputs, found = run_case(hybrids[case.model_type], case, drafter)
    assert outputs == answers
    assert found.compared > 0
    assert found.worst <= TOLERANCE, found


def test_covering_array_covers_every_pair() -> None:
    """Every pair of values of two axes occurs in some case."""
    assert {pair for case in COVERING for pair in pairs_in(vars(case))} == set(pairs_of(axes_of(RECURRENT)))


@pytest.mark.parametrize("case", COVERING, ids=name_of)
def test_rounds_leave_what_decoding_leaves(case: Case, hybrids: Hybrids, drafter: str) -> None:
    """Text is plain decoding's, and after every step every state and slot holds what one-token decoding leaves."""
    check(hybrids, case, drafter)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FULL, ids=name_of)
def test_rounds_of_the_full_product(case: Case, hybrids: Hybrids, drafter: str) -> None:
    """The same for every combination."""
    check(hybrids, case, drafter)


def control(model_type: str, state_mode: str) -> Case:
    return Case(
        model_type=model_type,
        kind="tree",
        state_mode=state_mode,
        block_size=4,
        drafts=7,
        late=False,
        temperature=0.0,
        token_budget=40,
    )


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", CONTROLLED)
def test_the_controls_case_is_clean(model_type: str, state_mode: str, hybrids: Hybrids, drafter: str) -> None:
    """The case of the negative controls passes when nothing is broken; drafts are accepted, and some stay pending."""
    answers, outputs, found = run_case(hybrids[model_type], control(model_type, state_mode), drafter)
    assert outputs == answers
    assert found.worst <= TOLERANCE
    assert found.accepted > 5
    assert (found.pending > 3) == (state_mode == "replay")


def broken_worst(hybrids: Hybrids, model_type: str, state_mode: str, drafter: str) -> float:
    try:
        return run_case(hybrids[model_type], control(model_type, state_mode), drafter)[2].worst
    except KeyError:  # the text left the known answers, so there is nothing to compare with
        return float("inf")


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", CONTROLLED)
def test_control_row_before_instead_of_parent(
    model_type: str, state_mode: str, hybrids: Hybrids, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: rows that start from the row before them, not their parent, fail by 100 x the tolerance."""
    real = state_layout_module.lay_out_states

    def broken(plan: Any, batch: Any, tables: Any, batch_idx: Any, parents: Any, depth: Any) -> Any:
        chain = torch.arange(parents.shape[0]) - 1
        chain = torch.where(parents < 0, -1, chain)
        return real(replace(plan, parents=None), batch, tables, batch_idx, chain, None)

    monkeypatch.setattr("specround.round.layout.lay_out_states", broken)
    assert broken_worst(hybrids, model_type, state_mode, drafter) > 100 * TOLERANCE


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", CONTROLLED)
def test_control_commit_of_a_wrong_row(
    model_type: str, state_mode: str, hybrids: Hybrids, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a commit that takes the row at the path's length, not the path's last row, fails."""
    real = ReferenceStateCommit.__call__

    def broken(kernel: Any, tables: Any, req_idx: Any, result: AcceptResult) -> None:
        columns = torch.arange(result.path.shape[1]).expand_as(result.path).to(result.path.dtype)
        wrong = AcceptResult(path=columns, num_committed=result.num_committed, token_ids=result.token_ids)
        real(kernel, tables, req_idx, wrong)

    monkeypatch.setattr(ReferenceStateCommit, "__call__", broken)
    assert broken_worst(hybrids, model_type, state_mode, drafter) > 100 * TOLERANCE


@pytest.mark.parametrize("model_type", CONTROLLED)
def test_control_double_fold(model_type: str, hybrids: Hybrids, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is pending is folded in twice when a round does not take it off the list."""
    real = ReferenceStateCommit.__call__

    def broken(kernel: Any, tables: Any, req_idx: Any, result: AcceptResult) -> None:
        kept = tables.pending_len[req_idx].clone(), tables.pending_path[req_idx].clone(), tables.parity[req_idx].clone()
        real(kernel, tables, req_idx, result)
        stale = (tables.pending_len[req_idx] == 0) & (kept[0] > 0)
        for tensor, old in zip((tables.pending_len, tables.pending_path, tables.parity), kept, strict=True):
            now = tensor[req_idx]
            tensor[req_idx] = torch.where(stale if now.ndim == 1 else stale[:, None], old, now)

    monkeypatch.setattr(ReferenceStateCommit, "__call__", broken)
    assert broken_worst(hybrids, model_type, "replay", drafter) > 100 * TOLERANCE
