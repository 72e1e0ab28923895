"""Identity and cache equality for families without recurrent layers: windows, sinks, soft caps, experts, MLA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_reference import ATTENTION_ONLY, ROUTER_GAP, FamilyReference
from family_rounds import TOLERANCE, Case, Found, axes_of, run_case, workload

import specround.round.layout as layout_module
from covering import covering_array, full_product, pairs_in, pairs_of
from specround.models.attention import AttentionLayer
from specround.models.families import FAMILIES

COVERING = [Case(**values) for values in covering_array(axes_of(ATTENTION_ONLY))]
FULL = [Case(**values) for values in full_product(axes_of(ATTENTION_ONLY))]
EXCUSED_SHARE = 1e-3
TALLY = Found()


def name_of(case: Case) -> str:
    values = (case.model_type, case.kind, f"b{case.block_size}", f"k{case.drafts}", f"t{case.temperature}")
    return "-".join([*values, "late" if case.late else "prompt"]).replace(" ", "_")


def check(reference: FamilyReference, case: Case) -> None:
    answers, outputs, found = run_case(reference, case)
    assert found.compared > 0
    assert found.worst <= TOLERANCE, found
    for prompt, answer, output in zip(workload(case.temperature)[0], answers, outputs, strict=True):
        if output != answer:
            gap = reference.prefix([*prompt, *answer]).router_gap
            assert gap <= ROUTER_GAP, f"router gap {gap:.1e}"
            found.excused += 1
    TALLY.compared += found.compared
    TALLY.excused += found.excused
    TALLY.worst = max(TALLY.worst, found.worst)


def test_covering_array_covers_every_pair() -> None:
    """Every pair of values of two axes occurs in some case."""
    assert {pair for case in COVERING for pair in pairs_in(vars(case))} == set(pairs_of(axes_of(ATTENTION_ONLY)))


@pytest.mark.parametrize("case", COVERING, ids=name_of)
def test_rounds_leave_plain_text_and_caches(case: Case, families: dict[str, FamilyReference]) -> None:
    """Text is plain decoding's, and after every step every slot holds what transformers' own cache would."""
    check(families[case.model_type], case)


def test_few_differences_are_excused() -> None:
    """Differences excused by a near tie of a router, in the cases above, stay below the contract's share."""
    assert TALLY.excused <= EXCUSED_SHARE * TALLY.compared, TALLY


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FULL, ids=name_of)
def test_rounds_of_the_full_product(case: Case, families: dict[str, FamilyReference]) -> None:
    """The same for every combination."""
    check(families[case.model_type], case)


def control(model_type: str) -> Case:
    return Case(model_type=model_type, kind="tree", block_size=4, drafts=15, late=False, temperature=0.0)


def row_number_windows(num_rows: Any, bounds: Any, context: Any) -> Any:
    """Broken: windows measure slots, so that a row's place in the tree does not count."""
    bits = context.bits
    if bits is None:
        return REAL_ROWS(num_rows, bounds, context)
    packed = torch.arange(bits.shape[0])
    owner = torch.bucketize(packed, context.row_start[1:].to(torch.int64), right=True)
    column = packed - context.row_start[owner]
    positions = torch.where(bits != 0, context.base[owner] + column, context.positions)
    changed = {"positions": positions, "key_offsets": None}
    return REAL_ROWS(num_rows, bounds, type(context)(**{**vars(context), **changed}))


REAL_ROWS = layout_module.lay_out_rows
WINDOWED = sorted(name for name, family in FAMILIES.items() if family.windows != "none")


@pytest.mark.parametrize("model_type", WINDOWED)
def test_control_windows_by_row_number(
    model_type: str, families: dict[str, FamilyReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: windows that measure row numbers instead of positions fail by more than 100 x the tolerance."""
    monkeypatch.setattr(layout_module, "lay_out_rows", row_number_windows)
    assert run_case(families[model_type], control(model_type))[2].worst > 100 * TOLERANCE


def without(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: attention layers drop their sinks or their soft cap."""
    real = AttentionLayer.attend

    def broken(layer: AttentionLayer, query: Any, key: Any, value: Any, scale: float, sinks: Any) -> Any:
        if feature == "softcap":
            layer.softcap = None
        return real(layer, query, key, value, scale, None if feature == "sinks" else sinks)

    monkeypatch.setattr(AttentionLayer, "attend", broken)


@pytest.mark.parametrize(("feature", "model_type"), [("sinks", "gpt_oss"), ("softcap", "gemma2")])
def test_control_dropped_feature(
    feature: str, model_type: str, families: dict[str, FamilyReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the sinks, or without the soft cap, it fails by more than 100 x the tolerance."""
    reference = families[model_type]
    run_case(reference, control(model_type))
    without(feature, monkeypatch)
    assert run_case(reference, control(model_type))[2].worst > 100 * TOLERANCE


def test_recorded_keys_are_what_a_cache_of_transformers_holds(families: dict[str, FamilyReference]) -> None:
    """The reference's keys and values, taken at eager attention, are bit for bit those of a `DynamicCache`."""
    reference, tokens = families["llama"], list(range(20))
    output = reference.module(input_ids=torch.tensor([tokens]), use_cache=True)
    for layer, (keys, values) in zip(output.past_key_values.layers, reference.run(tokens).caches, strict=True):
        assert torch.equal(layer.keys[0].transpose(0, 1), keys)
        assert torch.equal(layer.values[0].transpose(0, 1), values)
