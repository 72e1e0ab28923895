"""Logits through the hook equal transformers' eager attention: packed prompts, trees, and stored golden values."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from family_reference import ATTENTION_ONLY, KNOWN, ROUTER_GAP, FamilyReference
from packed_forward import PackedForward
from stateful_forward import StatefulForward
from torch.utils._python_dispatch import TorchDispatchMode

from specround import LLM, SamplingParams
from specround.models.families import FAMILIES

TOLERANCE = 1e-4
GOLDEN = Path(__file__).parent / "golden" / "logits.json"
LENGTHS = (3, 19, 2, 11)
PARENTS = (-1, 0, 1, 2, 3, 4, 5, 6, 2, 8, 0, 10, 11, 6, 13, 14)
"""Deeper than every window, with branches at all depths."""


def prompts_of(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(64) for _ in range(n)] for n in LENGTHS]


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_packed_prompts_and_trees_equal_eager_attention(model_type: str, families: dict[str, FamilyReference]) -> None:
    """Every row of a packed prefill, and every node of a tree deeper than the windows, has eager attention's logits."""
    reference, prompts = families[model_type], prompts_of(3)
    packed = PackedForward(reference.path, len(prompts), 64)
    head, tail = [p[: len(p) // 2] for p in prompts], [p[len(p) // 2 :] for p in prompts]
    packed.extend(head, [0] * len(prompts))
    logits = packed.extend(tail, [len(h) for h in head])  # so that rows also see keys of an earlier step
    expected = torch.cat([reference.run(p).logits[len(h) :] for p, h in zip(prompts, head, strict=True)])
    assert error_of(logits, expected) <= TOLERANCE

    source = random.Random(5)
    trees = [[source.randrange(64) for _ in PARENTS] for _ in prompts]
    parents = torch.tensor([PARENTS] * len(trees))
    found = packed.verify(trees, parents, [len(prompt) for prompt in prompts]).view(len(trees), len(PARENTS), -1)
    worst = 0.0
    for r, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for column in range(len(PARENTS)):
            path, place = [], column
            while place >= 0:
                path.insert(0, tree[place])
                place = PARENTS[place]
            run = reference.prefix([*prompt, *path])
            error = error_of(found[r, column], run.logits[len(prompt) + len(path) - 1])
            if error > TOLERANCE and run.router_gap <= ROUTER_GAP:
                continue
            worst = max(worst, error)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_greedy_equals_transformers_generate(model_type: str, families: dict[str, FamilyReference]) -> None:
    """Greedy text of a batch is what `generate` of transformers makes of each prompt alone."""
    reference, prompts = families[model_type], prompts_of(7)
    llm = LLM(reference.path, max_model_len=64, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.generate(p, 32) for p in prompts]


def golden_logits(path: str, model_type: str) -> torch.Tensor:
    """Logits of the last token of the golden prompt."""
    prompt = prompts_of(11)[1]
    if FAMILIES[model_type].recurrent:
        return StatefulForward(path, 1, 64, "replay").feed([prompt], [0], [True])[-1]
    return PackedForward(path, 1, 64).extend([prompt], [0])[-1]


def test_golden_logits(families: dict[str, FamilyReference]) -> None:
    """Our logits are the stored ones, whatever version of transformers is installed: a change in its maths shows."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert sorted(golden) == sorted(FAMILIES)
    drifted = {}
    for model_type in KNOWN:
        values = golden[model_type]
        found = golden_logits(families[model_type].path, model_type)[: len(values)]
        expected = torch.tensor(values)
        if error_of(found, expected) > TOLERANCE:
            drifted[model_type] = (found.tolist(), values)
    assert not drifted


SYNCS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "unique_dim", "_unique2", "masked_select"}


class WatchSyncs(TorchDispatchMode):
    """Names of operators that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in SYNCS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def syncs_of_a_forward(packed: PackedForward, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    watch, forward, logits = WatchSyncs(), packed.model.forward, packed.model.logits

    def watched(*args):
        with watch:
            hidden = forward(*args)
            logits(hidden)
            return hidden

    monkeypatch.setattr(packed.model, "forward", watched)
    packed.extend(prompts_of(3), [0] * 4)
    return watch.found


@pytest.mark.parametrize("model_type", ATTENTION_ONLY)
def test_a_forward_does_not_wait_for_the_device(
    model_type: str, families: dict[str, FamilyReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator of a forward reads a value back: experts and rotary embeddings included."""
    packed = PackedForward(families[model_type].path, 4, 64)
    assert syncs_of_a_forward(packed, monkeypatch) == []


def test_control_eager_experts_wait(families: dict[str, FamilyReference], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with transformers' loop over experts the watch finds operators that wait."""
    packed = PackedForward(families["mixtral"].path, 4, 64)
    packed.model._module.set_experts_implementation("eager")
    assert "nonzero" in syncs_of_a_forward(packed, monkeypatch)


@pytest.mark.parametrize("model_type", [name for name in KNOWN if FAMILIES[name].experts])
def test_experts_run_as_grouped_products(model_type: str, families: dict[str, FamilyReference]) -> None:
    """Loading selects grouped matrix products, and a row's result does not depend on the rows beside it."""
    model = PackedForward(families[model_type].path, 1, 8).model
    assert model.config._experts_implementation == "grouped_mm"
    block = next(part for part in model._module.modules() if hasattr(part, "experts"))
    rows = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = _first(block(rows))
        alone = torch.cat([_first(block(rows[:, i : i + 1])) for i in range(12)], 1)
    assert error_of(together, alone) <= 1e-6


def _first(output):
    return output[0] if isinstance(output, tuple) else output
