"""Rotary embeddings: a row's angles depend on its own position alone, and are transformers' for a request alone."""

from __future__ import annotations

import inspect
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_reference import FamilyReference
from family_rounds import TOLERANCE, Case, Found, drive, speculation_of
from packed_forward import PackedForward

from specround import LLM, SamplingParams
from specround.contract.errors import ModelError
from specround.models.causal_lm import CausalModel
from specround.models.families import FAMILIES
from specround.models.family import Family
from specround.models.pretrained import load_pretrained
from specround.models.rotary import HF_ROPE_TYPES, DynamicRope, LongRope, check_rope, own_rotary
from specround.models.sources import resolve_model
from tiny_models import tiny_config, tiny_llama, tiny_model

ORIGINAL = 24
OWN = sorted(name for name, family in FAMILIES.items() if family.rotary_halves and not family.rope_by_layer_type)
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}


def rotary_config(model_type: str, kind: str, length: int = 4 * ORIGINAL) -> Any:
    """A configuration with another rotary embedding."""
    half = 2 if model_type == "deepseek_v3" else 4
    values = PARAMETERS[kind] | {"rope_type": kind, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    if kind == "longrope":
        values |= {"short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}
    arguments = tiny_config(model_type) | {"rope_parameters": values, "max_position_embeddings": length}
    if model_type == "phi3":
        arguments["original_max_position_embeddings"] = ORIGINAL
    return getattr(transformers, FAMILIES[model_type].config_class)(**arguments)


def hf_rotary(model_type: str, config: Any) -> torch.nn.Module:
    """A fresh module of transformers, which remembers no earlier request."""
    with torch.device("meta"):
        module = getattr(transformers, FAMILIES[model_type].model_class)(config)
    return type(module.model.rotary_emb)(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "kind"), [pair for pair in product(OWN, ["dynamic", "longrope"]) if pair != ("phi3", "dynamic")]
)
def test_a_row_is_what_transformers_gives_a_request_alone(model_type: str, kind: str, dtype: torch.dtype) -> None:
    """Each row of a packed batch equals bit for bit a fresh module's result for that token decoded alone."""
    config = rotary_config(model_type, kind, ORIGINAL if kind == "dynamic" else 4 * ORIGINAL)
    own = own_rotary(FAMILIES[model_type], config)
    assert isinstance(own, LongRope if kind == "longrope" else DynamicRope)
    positions = torch.tensor([[0, ORIGINAL + 5, 3, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 90]])
    x = torch.zeros(1, dtype=dtype)
    cos, sin = own(x, positions)
    for row, position in enumerate(positions[0]):
        expected = hf_rotary(model_type, config)(x, position.view(1, 1))
        for ours, theirs in zip((cos, sin), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours[:, row], theirs[:, 0])


@pytest.mark.parametrize("kind", HF_ROPE_TYPES)
@pytest.mark.parametrize("model_type", ["llama", "cohere2", "glm4", "gpt_oss", "deepseek_v3", "olmo2"])
def test_modules_of_transformers_treat_rows_apart(model_type: str, kind: str) -> None:
    """For the kinds left to transformers, a row's result is bit for bit that of the row alone."""
    config = rotary_config(model_type, kind)
    rotary, x = hf_rotary(model_type, config), torch.zeros(1)
    positions = torch.tensor([[0, 90, 3, ORIGINAL - 1, ORIGINAL]])
    together = rotary(x, positions)
    for row, position in enumerate(positions[0]):
        alone = rotary(x, position.view(1, 1))
        assert all(torch.equal(a[:, row], b[:, 0]) for a, b in zip(together, alone, strict=True))


def long_phi3(directory: Path) -> FamilyReference:
    return FamilyReference(
        tiny_model(directory, "phi3", sliding_window=None, original_max_position_embeddings=ORIGINAL)
    )


def with_hf_rotary(model: CausalModel) -> None:
    """Broken: transformers' own rotary embedding, which looks at the largest position of the batch."""
    model._module.model.rotary_emb = hf_rotary("phi3", model.config)


SHORT, LONG = list(range(3, 13)), list(range(60))


@pytest.mark.parametrize("broken", [False, True])
def test_a_long_neighbour_does_not_change_a_short_request(tmp_path: Path, broken: bool) -> None:
    """Logits and text of a short request do not see the length of another; with transformers' rotary they do."""
    path = long_phi3(tmp_path).path
    logits, texts = [], []
    for requests in ([SHORT], [SHORT, LONG]):
        packed = PackedForward(path, 2, 64)
        llm = LLM(path, max_model_len=128)
        if broken:
            with_hf_rotary(packed.model)
            with_hf_rotary(llm.engine.model)
        logits.append(packed.extend(requests, [0] * len(requests))[: len(SHORT)])
        prompts = [{"prompt_token_ids": tokens} for tokens in requests]
        texts.append(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0])
    error = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    same = texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids
    assert error > 100 * TOLERANCE if broken else error <= TOLERANCE
    assert same or broken


@torch.no_grad()
def one_by_one(module: Any, tokens: list[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits and cache of transformers when every token is its own forward."""
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    cache, logits = None, []
    for token in tokens:
        output = module(input_ids=torch.tensor([[token]]), use_cache=True, **{name: cache})
        cache = output.past_key_values
        logits.append(output.logits[0, -1])
    layers = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]
    return torch.stack(logits), layers


@pytest.mark.parametrize("kind", ["chain", "tree", "mask", "self tree"])
@pytest.mark.parametrize("late", [False, True])
def test_requests_that_cross_the_boundary(tmp_path: Path, kind: str, late: bool) -> None:
    """Across the original length, text and caches with trees are those of transformers' one-token decoding."""
    reference = long_phi3(tmp_path)
    prompts = [SHORT, list(range(20, 20 + ORIGINAL - 2)), [5]]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 20, 40)]
    answers = reference.plain(prompts, sampling, 64)
    runs = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits, caches = one_by_one(reference.module, [*prompt, *answer])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        reference.remember([*prompt, *answer], logits, caches)
        runs.append(logits)
    case = Case(model_type="phi3", kind=kind, block_size=4, drafts=15, late=late, temperature=0.0)
    speculation = speculation_of(reference, case, prompts, answers)
    llm = LLM(reference.path, speculation, max_model_len=64, block_size=4, async_scheduling=late)
    models, found = [reference] * (2 if kind == "self tree" else 1), Found()
    assert drive(llm, models, prompts, sampling, found) == answers
    assert found.compared > 0
    assert found.worst <= TOLERANCE


def test_within_the_original_length_text_is_that_of_generate(tmp_path: Path) -> None:
    """A request that stays within the original length gets what `generate` of transformers makes, prefill included."""
    reference = long_phi3(tmp_path)
    prompts = [SHORT, list(range(ORIGINAL - 6)), [5]]
    outputs = LLM(reference.path, max_model_len=64).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(temperature=0, max_tokens=ORIGINAL - len(p), ignore_eos=True) for p in prompts],
    )
    expected = [reference.generate(prompt, ORIGINAL - len(prompt)) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_dynamic_scaling_is_loaded(tmp_path: Path) -> None:
    """A checkpoint with dynamic scaling gets our module; its text is that of `generate`."""
    import json

    path = tiny_llama(tmp_path, max_position=64) / "config.json"
    values = json.loads(path.read_text())
    del values["rope_theta"]
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path.write_text(json.dumps(values | {"rope_parameters": rope}))
    reference = FamilyReference(tmp_path)
    llm = LLM(reference.path, max_model_len=64)
    assert isinstance(llm.engine.model._module.model.rotary_emb, DynamicRope)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert llm.generate([{"prompt_token_ids": SHORT}], params)[0].outputs[0].token_ids == reference.generate(SHORT, 40)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - set(OWN)))
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", None])
def test_kinds_that_would_mix_requests_are_refused(model_type: str, kind: str | None) -> None:
    """Where our module cannot stand in, kinds that look at the whole batch are refused by name, like unknown ones."""
    family: Family = FAMILIES[model_type]
    rope: dict[str, Any] = {"rope_type": kind}
    config = type("Config", (), {"rope_parameters": {"full_attention": rope} if family.rope_by_layer_type else rope})
    with pytest.raises(ModelError, match=r"rope_type=.*one of.*yarn"):
        check_rope(family, config, "m")


def test_only_the_two_kinds_are_replaced(tmp_path: Path) -> None:
    """A model with the default kind keeps transformers' module."""
    loaded = load_pretrained(resolve_model(str(tiny_llama(tmp_path))), torch.float32, torch.device("cpu"))
    assert type(loaded.module.model.rotary_emb).__name__ == "LlamaRotaryEmbedding"
