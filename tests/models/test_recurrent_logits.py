"""Models with recurrent layers, packed, equal references that step token by token, in both state modes."""

from __future__ import annotations

import random

import pytest
import torch
from family_reference import RECURRENT, ROUTER_GAP, RecurrentReference
from packed_forward import PackedForward
from stateful_forward import StatefulForward
from test_families_logits import TOLERANCE, WatchSyncs, error_of, prompts_of

from specround import LLM, SamplingParams
from specround.kernels.state_rows import StateMode
from specround.models.families import FAMILIES

MODES: tuple[StateMode, ...] = ("slots", "replay")
BRANCHING = [name for name in RECURRENT if FAMILIES[name].verifies == "tree"]
PARENTS = (-1, 0, 1, 2, 3, 4, 1, 6, 7, 0, 9, 9, 6)
"""Branches at all depths, deeper than every convolution is wide."""
PATH = (0, 1, 6, 7, 8)


def worst_of(found: torch.Tensor, reference: RecurrentReference, sequences: list[list[int]], start: list[int]) -> float:
    """Largest error of packed rows: those of request r are its tokens from `start[r]`."""
    worst, first = 0.0, 0
    for tokens, begin in zip(sequences, start, strict=True):
        run = reference.run(tokens)
        rows = found[first : first + len(tokens) - begin]
        first += len(rows)
        error = error_of(rows, run.logits[begin:])
        worst = max(worst, 0.0 if error > TOLERANCE and run.router_gap <= ROUTER_GAP else error)
    assert first == len(found)
    return worst


def tree_error(
    found: torch.Tensor, reference: RecurrentReference, prompts: list[list[int]], trees: list[list[int]]
) -> float:
    """Largest error of the rows of trees, `[R, C, V]`."""
    worst = 0.0
    for r, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for column in range(len(PARENTS)):
            path, place = [], column
            while place >= 0:
                path.insert(0, tree[place])
                place = PARENTS[place]
            run = reference.run([*prompt, *path])
            error = error_of(found[r, column], run.logits[-1])
            worst = max(worst, 0.0 if error > TOLERANCE and run.router_gap <= ROUTER_GAP else error)
    return worst


def trees_of(count: int, seed: int = 5) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(64) for _ in PARENTS] for _ in range(count)]


@pytest.mark.parametrize("model_type", RECURRENT)
def test_reference_equals_transformers(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """The reference's loops compute what transformers' own modules do, where those norm as the original ones do."""
    reference = families[model_type]
    if not reference.has_group_norm:
        pytest.skip("this version of transformers norms over the full width")
    for prompt in prompts_of(3):
        with torch.no_grad():
            theirs = reference.original(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        assert error_of(theirs, reference.run(prompt).logits) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", RECURRENT)
def test_prompts_at_once_in_chunks_and_by_token(
    model_type: str, mode: StateMode, families: dict[str, RecurrentReference]
) -> None:
    """Prompts of unequal lengths together, cut into chunks that end with and without a root, then token by token."""
    reference, prompts = families[model_type], prompts_of(3)
    whole = StatefulForward(reference.path, len(prompts), 64, mode)
    assert worst_of(whole.feed(prompts, [0] * 4, [True] * 4), reference, prompts, [0] * 4) <= TOLERANCE

    packed = StatefulForward(reference.path, len(prompts), 64, mode)
    cuts = [len(prompt) // 2 for prompt in prompts]
    packed.feed([p[:cut] for p, cut in zip(prompts, cuts, strict=True)], [0] * 4, [False] * 4)
    found = packed.feed([p[cut:] for p, cut in zip(prompts, cuts, strict=True)], cuts, [True, False, True, True])
    assert worst_of(found, reference, prompts, cuts) <= TOLERANCE
    grown = [list(prompt) for prompt in prompts]
    for token in (7, 21, 40, 3, 55):
        lengths = [len(tokens) for tokens in grown]
        found = packed.feed([[token + r] for r in range(4)], lengths, [True] * 4)
        for r in range(4):
            grown[r].append(token + r)
        assert worst_of(found, reference, grown, lengths) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", BRANCHING)
def test_trees_and_what_follows_them(model_type: str, mode: StateMode, families: dict[str, RecurrentReference]) -> None:
    """Every node of a tree sees its path; two rounds later the accepted path is what the states hold."""
    reference, prompts = families[model_type], prompts_of(3)
    packed = StatefulForward(reference.path, len(prompts), 64, mode)
    packed.feed(prompts, [0] * 4, [True] * 4)
    parents, trees = torch.tensor([PARENTS] * 4), trees_of(4)
    grown = [list(prompt) for prompt in prompts]
    paths = [PATH, (0,), (0, 9, 11), (0, 1)]
    for seed in (5, 6):
        trees, lengths = trees_of(4, seed), [len(tokens) for tokens in grown]
        found = packed.verify_tree(trees, parents, lengths)
        assert tree_error(found, reference, grown, trees) <= TOLERANCE
        packed.commit(paths, lengths)
        for r, path in enumerate(paths):
            grown[r] += [trees[r][column] for column in path]
    lengths = [len(tokens) for tokens in grown]
    found = packed.feed([[9], [8], [7], [6]], lengths, [True] * 4)
    assert worst_of(found, reference, [[*t, 9 - r] for r, t in enumerate(grown)], lengths) <= TOLERANCE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", BRANCHING)
def test_control_wrong_parents(model_type: str, mode: StateMode, families: dict[str, RecurrentReference]) -> None:
    """Negative control: with another parent for one node of the tree in the recurrent layers, its logits are wrong."""
    reference, prompts = families[model_type], prompts_of(3)[:2]
    packed = StatefulForward(reference.path, 2, 64, mode)
    packed.feed(prompts, [0] * 2, [True] * 2)
    told = torch.tensor([PARENTS] * 2)
    told[:, 6] = 3
    found = packed.verify_tree(trees_of(2), torch.tensor([PARENTS] * 2), [len(p) for p in prompts], told)
    assert tree_error(found, reference, prompts, trees_of(2)) > 100 * TOLERANCE


@pytest.mark.parametrize("model_type", RECURRENT)
def test_neighbours_change_nothing(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """A prompt's logits are the same alone and beside others."""
    reference, prompts = families[model_type], prompts_of(3)
    together = StatefulForward(reference.path, 4, 64, "replay").feed(prompts, [0] * 4, [True] * 4)
    alone = StatefulForward(reference.path, 1, 64, "replay").feed([prompts[1]], [0], [True])
    assert error_of(together[len(prompts[0]) :][: len(prompts[1])], alone) <= TOLERANCE / 10


@pytest.mark.parametrize("model_type", RECURRENT)
def test_16_bit_models_keep_their_type(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """In bfloat16 logits are near those of float32, hidden states have the model's type, and states are float32."""
    reference, prompts = families[model_type], prompts_of(3)
    packed = StatefulForward(reference.path, 4, 64, "replay", dtype=torch.bfloat16)
    found = packed.feed(prompts, [0] * 4, [True] * 4)
    assert found.dtype == torch.bfloat16
    expected = torch.cat([reference.run(prompt).logits for prompt in prompts])
    assert float((found.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()) <= 0.2
    for layer in packed.model.recurrent_layers:
        assert layer.conv_cache is not None
        assert layer.conv_cache.windows.dtype == torch.bfloat16
        assert layer.state_cache is None or layer.state_cache.states.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_forward_does_not_wait_for_the_device(
    model_type: str, mode: StateMode, families: dict[str, RecurrentReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator of a forward reads a value back."""
    packed = StatefulForward(families[model_type].path, 4, 64, mode)
    watch, forward = WatchSyncs(), packed.model.forward

    def watched(*args: object) -> torch.Tensor:
        with watch:
            return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(packed.model, "forward", watched)
    packed.feed(prompts_of(3), [0] * 4, [True] * 4)
    if model_type in BRANCHING:
        packed.verify_tree(trees_of(4), torch.tensor([PARENTS] * 4), [len(p) for p in prompts_of(3)])
    assert watch.found == []


CLAMPED = ("nemotron_h", "zamba2")
"""Their tiny models have limits of step sizes, which transformers applies to prompts and not to single steps."""


@pytest.mark.parametrize("model_type", [name for name in RECURRENT if name not in CLAMPED])
def test_greedy_equals_transformers_generate(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """Greedy text of a batch is what `generate` of transformers makes of each prompt alone."""
    reference, prompts = families[model_type], prompts_of(7)
    if not reference.has_group_norm:
        pytest.skip("this version of transformers norms over the full width")
    llm = LLM(reference.path, max_model_len=64, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.generate(p, 24) for p in prompts]


def test_positions_of_three_sections(families: dict[str, RecurrentReference]) -> None:
    """Positions by time, height and width rotate as in transformers; equal ones are plain positions."""
    reference, prompt = families["qwen3_5_text"], prompts_of(3)[1]
    time = torch.arange(len(prompt))
    sections = torch.stack([time, time // 3, time % 5])
    for positions in (torch.stack([time] * 3), sections):
        packed = StatefulForward(reference.path, 1, 64, "replay")
        forward = packed.model.forward
        packed.model.forward = lambda ids, _, *rest, p=positions, f=forward: f(ids, p, *rest)  # type: ignore[method-assign, misc]
        found = packed.feed([prompt], [0], [True])
        with torch.no_grad():
            theirs = reference.module(
                input_ids=torch.tensor([prompt]), position_ids=positions[:, None], use_cache=False
            ).logits[0]
        assert error_of(found, theirs) <= TOLERANCE
    assert error_of(found, reference.run(prompt).logits) > 100 * TOLERANCE


def test_states_are_needed(families: dict[str, RecurrentReference]) -> None:
    """A forward without states is refused where there are recurrent layers."""
    packed = PackedForward(families["mamba2"].path, 1, 64)
    with pytest.raises(AssertionError):
        packed.extend([[1, 2]], [0])
