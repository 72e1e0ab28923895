"""Which mixers stand in for which modules, what they claim to verify, and what is refused at load."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_reference import ABSENT, RECURRENT, RecurrentReference
from torch import nn

from specround.contract import ModelError, SpecLimit
from specround.kernels.registry import KernelRegistry
from specround.models.attention import HOOK_NAME, ForwardContext
from specround.models.causal_lm import CausalModel
from specround.models.families import FAMILIES
from specround.models.pretrained import load_pretrained
from specround.models.probe import InstalledLayers, install_layers
from specround.models.recurrent.install import MIXERS, mixers_by_class
from specround.models.recurrent.mamba2 import Mamba2Mixer
from specround.models.recurrent.mixer import Mixer, declared_limit
from specround.models.recurrent.short_conv import ShortConvMixer
from specround.models.sources import resolve_model

CONTENTS = {
    "bamba": ((1,), (0, 2)),
    "falcon_h1": ((0, 1), (0, 1)),
    "falcon_mamba": ((), (0, 1)),
    "granitemoehybrid": ((1,), (0, 2)),
    "jamba": ((1,), (0, 2)),
    "kimi_linear": ((1,), (0, 2)),
    "lfm2": ((1,), (0, 2)),
    "mamba": ((), (0, 1)),
    "mamba2": ((), (0, 1)),
    "nemotron_h": ((1,), (0, 4)),
    "olmo_hybrid": ((1,), (0, 2)),
    "qwen3_5_text": ((1,), (0, 2)),
    "qwen3_next": ((1,), (0, 2)),
    "zamba2": ((1, 3), (0, 1, 2, 3)),
}
"""Blocks with attention, and with a recurrent module, of the tiny models."""


def module_of(reference: RecurrentReference) -> Any:
    return load_pretrained(resolve_model(reference.path), torch.float32, torch.device("cpu")).module


def install(module: Any, model_type: str, **options: Any) -> InstalledLayers:
    if FAMILIES[model_type].has_attention:
        module.set_attn_implementation(HOOK_NAME)
    return install_layers(module, FAMILIES[model_type], ForwardContext(), **options)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_each_block_has_what_the_configuration_says(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """Attention and recurrent layers are in the blocks that the configuration names, under names of their own."""
    model = CausalModel(load_pretrained(resolve_model(families[model_type].path), torch.float32, torch.device("cpu")))
    attention, recurrent = CONTENTS[model_type]
    assert [layer.block for layer in model.layers] == list(attention)
    assert [layer.index for layer in model.layers] == list(range(len(attention)))
    assert [layer.name for layer in model.recurrent_layers] == [f"target.{block}.state" for block in recurrent]
    names = [descriptor.name for descriptor in model.descriptors]
    assert names == [*(f"target.{block}" for block in attention), *(f"target.{block}.state" for block in recurrent)]
    assert len(model.kv_shapes) == len(model.attention_descriptors) == len(attention)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_limits_and_keys(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """What the table of families says is what the mixers declare; kernels of both state modes exist for each layer."""
    source = resolve_model(families[model_type].path)
    for mode in ("slots", "replay"):
        pretrained = load_pretrained(source, torch.float32, torch.device("cpu"))
        model = CausalModel(pretrained, state_mode=mode)
        assert {limit.kind for limit in model.limits} == {FAMILIES[model_type].verifies}
        descriptors = model.descriptors[len(model.layers) :]
        assert all(f"@{mode}/" in str(d.verify_key) + str(d.commit_key) + str(d.other_keys) for d in descriptors)
        assert all(KernelRegistry(()).limit(descriptor).kind == "tree" for descriptor in descriptors)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_state_bytes_are_what_caches_take(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """The memory announced for a block and for a row slot is what allocating more of them takes."""
    model = CausalModel(load_pretrained(resolve_model(families[model_type].path), torch.bfloat16, torch.device("cpu")))
    sizes = []
    for blocks, slots in ((3, 0), (4, 0), (4, 1)):
        model.bind_states(KernelRegistry(()), blocks, slots)
        caches = [cache for layer in model.recurrent_layers for cache in (layer.conv_cache, layer.state_cache)]
        tensors = [tensor for cache in caches if cache is not None for tensor in vars(cache).values()]
        sizes.append(sum(tensor.numel() * tensor.itemsize for tensor in tensors))
    assert model.state_bytes == (sizes[1] - sizes[0], sizes[2] - sizes[1])


def test_every_mixer_declares_in_its_own_body() -> None:
    """No built-in mixer relies on what it inherits, and every class that it replaces is one of transformers."""
    classes = {name for name, _ in _recurrent_classes_of_transformers()}
    for mixer in set(MIXERS.values()):
        assert "replaces" in vars(mixer)
        assert isinstance(vars(mixer)["verifies"], SpecLimit)
        assert declared_limit(mixer) is vars(mixer)["verifies"]
        assert set(mixer.replaces) & classes or ABSENT, mixer


def _recurrent_classes_of_transformers() -> list[tuple[str, type]]:
    found = []
    for name in RECURRENT:
        model_class = getattr(transformers, FAMILIES[name].model_class, None)
        if model_class is not None:
            found += inspect.getmembers(inspect.getmodule(model_class), inspect.isclass)
    return found


class Inherits(Mamba2Mixer):
    """Says nothing of its own."""


class Declares(Mamba2Mixer):
    """Says all of it."""

    replaces = ("Mamba2Mixer",)
    verifies = SpecLimit("chain", "it is slow")


def test_a_declaration_is_not_inherited(families: dict[str, RecurrentReference]) -> None:
    """A subclass that declares nothing replaces nothing, and where it is put in place it verifies chains only."""
    assert mixers_by_class([Inherits]) == {}
    limit = declared_limit(Inherits)
    assert limit.kind == "chain"
    assert "Inherits" in limit.reason
    assert "a declaration is not inherited" in limit.reason
    layers = install(module_of(families["mamba2"]), "mamba2", mixers={"Mamba2Mixer": Inherits}).recurrent
    assert [layer.limit for layer in layers] == [limit, limit]
    assert declared_limit(Declares) == Declares.verifies
    assert mixers_by_class([Declares]) == {"Mamba2Mixer": Declares}


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_class_without_a_mixer_is_refused(model_type: str, families: dict[str, RecurrentReference]) -> None:
    """A recurrent module that no mixer replaces is refused by its block and the classes found there."""
    with pytest.raises(ModelError, match=rf"recurrent modules of layer 0 of '{model_type}'="):
        install(module_of(families[model_type]), model_type, mixers={"Unheard": ShortConvMixer})


def test_a_recurrent_module_where_none_is_announced(families: dict[str, RecurrentReference]) -> None:
    """A mixer's class, or any convolution over rows, in a block that the configuration calls attention is refused."""
    module = module_of(families["bamba"])
    module.model.layers[1].extra = module.model.layers[0].mamba
    with pytest.raises(ModelError, match=r"recurrent modules of layer 1 of 'bamba'=\['BambaMixer'\]: must be 0 of"):
        install(module, "bamba")
    module = module_of(families["bamba"])
    module.model.layers[1].feed_forward.smear = nn.Conv1d(4, 4, 3)
    with pytest.raises(ModelError, match=r"recurrent modules of layer 1 of 'bamba'='BambaMLP'.*convolves over rows"):
        install(module, "bamba")


def test_attention_where_none_is_announced(families: dict[str, RecurrentReference]) -> None:
    """Attention in a block that the configuration calls recurrent is refused."""
    module = module_of(families["bamba"])
    attention, mamba = module.model.layers[1].self_attn, module.model.layers[0].mamba
    real = mamba.in_proj.forward

    def attend(x: torch.Tensor) -> torch.Tensor:
        cos = torch.ones(1, 1, attention.head_dim)
        attention(x[None], position_embeddings=(cos, cos), attention_mask=None)
        return real(x)

    mamba.in_proj.forward = attend
    with pytest.raises(ModelError, match=r"layer 1 calls it 2 times"):
        install(module, "bamba")


class Twice(ShortConvMixer):
    """Convolves twice."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        super().mix(x)
        return super().mix(x)


class Silent(ShortConvMixer):
    """Leaves its input as it is."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("mixer", [Twice, Silent])
def test_a_mixer_calls_each_op_once(mixer: type[Mixer], families: dict[str, RecurrentReference]) -> None:
    """A mixer that calls an op twice, or never, or a block that does not call its mixer, is refused."""
    module = module_of(families["lfm2"])
    with pytest.raises(ModelError, match=r"recurrent ops of layer 0 of 'lfm2'="):
        install(module, "lfm2", mixers={"Lfm2ShortConv": mixer})


def test_a_block_that_does_not_call_its_mixer(families: dict[str, RecurrentReference]) -> None:
    """A block that goes past its recurrent module is refused."""
    module = module_of(families["lfm2"])
    module.model.layers[2].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(ModelError, match=r"recurrent ops of layer 2 of 'lfm2'=\[\]"):
        install(module, "lfm2")


@pytest.mark.parametrize(
    ("model_type", "layer_types"),
    [("qwen3_next", ["sliding_attention"] * 3), ("lfm2", ["conv", "full_attention"]), ("kimi_linear", ["conv"] * 3)],
)
def test_layer_types_that_are_not_computed(
    model_type: str, layer_types: list[str], families: dict[str, RecurrentReference]
) -> None:
    """Block types that this family does not have are refused."""
    config = families[model_type].original.config
    before = config.layer_types
    try:
        config.layer_types = layer_types
        with pytest.raises(ModelError, match="layer_types="):
            FAMILIES[model_type].check(config)
    finally:
        config.layer_types = before


def test_quantization_is_refused(families: dict[str, RecurrentReference]) -> None:
    """Packed weights are for decoders that run fused."""
    loaded = load_pretrained(resolve_model(families["lfm2"].path), torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="quantization="):
        CausalModel(loaded, quantization="int8")


def test_models_without_positions_have_a_length(families: dict[str, RecurrentReference]) -> None:
    """A model whose configuration names no longest sequence has one all the same."""
    assert (
        load_pretrained(
            resolve_model(str(Path(families["mamba"].path))), torch.float32, torch.device("cpu")
        ).max_position_embeddings
        == 2**17
    )
