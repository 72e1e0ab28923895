"""Checkpoints of models with recurrent layers: names of the original files, parts, and weights that are left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from family_reference import RecurrentReference
from stateful_forward import StatefulForward
from test_families_loading import Weights, change_weights, copy_of, load
from test_families_logits import TOLERANCE, error_of, prompts_of

from specround.contract.errors import ModelError
from specround.models.families import FAMILIES
from tiny_models import tiny_config


def renamed(old: str, new: str) -> Callable[[Weights], object]:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if old in name]:
            weights[name.replace(old, new)] = weights.pop(name)

    return change


def same_weights(directory: Path, reference: RecurrentReference) -> bool:
    found, expected = load(directory).module.state_dict(), load(reference.path).module.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model_type", "old", "new"),
    [
        ("mamba", "backbone.embeddings.", "backbone.embedding."),
        ("mamba2", "backbone.embeddings.", "backbone.embedding."),
        ("qwen3_5_text", "model.", "model.language_model."),
    ],
)
def test_other_names_of_weights(
    model_type: str, old: str, new: str, families: dict[str, RecurrentReference], tmp_path: Path
) -> None:
    """Files under the names of first publications load like those that transformers writes."""
    directory = copy_of(families[model_type], tmp_path)
    change_weights(directory, renamed(old, new))
    assert same_weights(directory, families[model_type])


@pytest.mark.parametrize(("model_type", "block"), [("kimi_linear", "self_attn"), ("olmo_hybrid", "linear_attn")])
def test_convolutions_stored_together_or_apart(
    model_type: str, block: str, families: dict[str, RecurrentReference], tmp_path: Path
) -> None:
    """Queries', keys' and values' convolutions load from one tensor or three; a missing or wrong one is refused."""
    reference = families[model_type]
    whole = load(reference.path).module.state_dict()
    merged = f"model.layers.0.{block}.conv1d.weight"
    apart = [f"model.layers.0.{block}.{part}_conv1d.weight" for part in "qkv"]
    rows = whole[merged].shape[0]
    value_rows = rows // 3 if model_type == "kimi_linear" else rows * 48 // 80
    key_rows = (rows - value_rows) // 2
    parts = dict(zip(apart, whole[merged].split([key_rows, key_rows, value_rows]), strict=True))
    parts = {name: part.clone() for name, part in parts.items()}

    def store(kept: Weights) -> Callable[[Weights], object]:
        def change(weights: Weights) -> None:
            for name in [merged, *apart]:
                weights.pop(name, None)
            weights.update(kept)

        return change

    for i, kept in enumerate((parts, {merged: whole[merged]})):
        directory = copy_of(reference, tmp_path / str(i))
        change_weights(directory, store(kept))
        assert same_weights(directory, reference)
    broken: list[tuple[Weights, str]] = [
        ({name: parts[name] for name in apart[:2]}, rf"{apart[2]}.*missing"),
        (parts | {apart[0]: parts[apart[0]][1:]}, r"conv1d\.weight=.*as the config says"),
        (parts | {apart[2]: parts[apart[2]][:-2]}, r"v_conv1d\.weight=.*as the config says"),
        (parts | {merged: whole[merged]}, "not both"),
    ]
    for i, (kept, message) in enumerate(broken):
        directory = copy_of(reference, tmp_path / f"broken{i}")
        change_weights(directory, store(kept))
        with pytest.raises(ModelError, match=message):
            load(directory)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_text", "mtp.layers.0.mlp.up_proj.weight"),
        ("qwen3_5_text", "model.visual.patch_embed.proj.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight"),
    ],
)
def test_weights_that_are_left_out(
    model_type: str, name: str, families: dict[str, RecurrentReference], tmp_path: Path
) -> None:
    """Multi-token prediction and vision weights are skipped by the table; other unknown weights are refused."""
    directory = copy_of(families[model_type], tmp_path)
    change_weights(directory, lambda weights: weights.update({name: torch.zeros(3)}))
    assert same_weights(directory, families[model_type])
    other = f"model.{name.replace('.visual.', '.auditory.')}"
    change_weights(directory, lambda weights: weights.update({other: torch.zeros(3)}))
    with pytest.raises(ModelError, match="does not use"):
        load(directory)


def test_weights_stored_under_two_names_must_agree(families: dict[str, RecurrentReference], tmp_path: Path) -> None:
    """A weight under its old and its new name at once is refused unless both are the same."""
    directory = copy_of(families["mamba"], tmp_path)
    old, new = "backbone.embedding.weight", "backbone.embeddings.weight"
    change_weights(directory, lambda weights: weights.update({old: weights[new].clone()}))
    assert same_weights(directory, families["mamba"])
    change_weights(directory, lambda weights: weights.update({old: weights[new] + 1}))
    with pytest.raises(ModelError, match="different values"):
        load(directory)


@pytest.mark.parametrize("limit", [[0.0, {"__float__": "Infinity"}], [0.0, float("inf")], [0.01, 0.5]])
def test_step_limits(limit: list[object], families: dict[str, RecurrentReference], tmp_path: Path) -> None:
    """Infinity is read as transformers writes it and as Python does; finite limits reach the mixer."""
    directory = copy_of(families["bamba"], tmp_path, time_step_limit=limit)
    expected = (limit[0], float("inf") if isinstance(limit[1], dict) else limit[1])
    assert tuple(load(directory).module.model.layers[0].mamba.time_step_limit) == expected


def test_a_type_that_this_transformers_lacks(
    families: dict[str, RecurrentReference], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A supported type that the installed transformers does not know is refused with its version."""
    directory = copy_of(families["lfm2"], tmp_path)
    changed = dataclasses.replace(FAMILIES["lfm2"], config_class="Lfm9Config")
    monkeypatch.setitem(FAMILIES, "lfm2", changed)
    with pytest.raises(ModelError, match=r"model_type='lfm2'.*has no Lfm9Config: it is too old"):
        load(directory)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_a_model_that_reads_images(tied: bool, tmp_path: Path) -> None:
    """Of a model with a vision tower the text part is loaded alone: its logits are the whole model's for text."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = tiny_config("qwen3_5_text")
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for i, parameter in enumerate(whole.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.copy_(0.3 * noise)
    whole.save_pretrained(tmp_path)
    prompt = prompts_of(3)[1]
    found = StatefulForward(tmp_path, 1, 64, "replay").feed([prompt], [0], [True])
    with torch.no_grad():
        theirs = whole(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    assert error_of(found, theirs) <= TOLERANCE
    stored = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (({"architectures": ["Own"]}, "architectures="), ({"text_config": None}, "text_config=")):
        (tmp_path / "config.json").write_text(json.dumps(stored | changes))
        with pytest.raises(ModelError, match=message):
            load(tmp_path)


def test_block_types_of_first_publications(families: dict[str, RecurrentReference], tmp_path: Path) -> None:
    """A pattern of letters says what blocks contain, as in the files of that type."""
    directory = copy_of(families["nemotron_h"], tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["layers_block_type"]
    (directory / "config.json").write_text(json.dumps(config | {"hybrid_override_pattern": "M*-EM"}))
    assert same_weights(directory, families["nemotron_h"])
