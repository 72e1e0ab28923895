"""Loading every family: the weights of `from_pretrained`, no code of a checkpoint, and refusals by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_reference import KNOWN, FamilyReference
from safetensors.torch import load_file, save_file

from specround.contract.errors import ModelError
from specround.models.attention import HOOK_NAME, ForwardContext
from specround.models.causal_lm import CausalModel
from specround.models.families import FAMILIES, REFUSED, family_of
from specround.models.pretrained import Pretrained, load_pretrained
from specround.models.probe import install_layers
from specround.models.sources import resolve_model
from tiny_models import tiny_config, tiny_model

ALL = KNOWN
STORED_TOGETHER = ("gpt_oss", "granitemoehybrid")
WITH_EXPERTS = [name for name in ALL if FAMILIES[name].experts and name not in STORED_TOGETHER]
Weights = dict[str, torch.Tensor]


def load(directory: Path | str, dtype: torch.dtype = torch.float32) -> Pretrained:
    return load_pretrained(resolve_model(str(directory)), dtype, torch.device("cpu"))


def config_of(model_type: str, **changes: Any) -> Any:
    return getattr(transformers, FAMILIES[model_type].config_class)(**(tiny_config(model_type) | changes))


def copy_of(reference: FamilyReference, directory: Path, **changes: Any) -> Path:
    shutil.copytree(reference.path, directory, dirs_exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def change_weights(directory: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ALL)
def test_equals_transformers_loading(model_type: str, dtype: torch.dtype, families: dict[str, FamilyReference]) -> None:
    """Parameters and buffers, computed ones included, equal bit for bit and in type those of `from_pretrained`."""
    reference = families[model_type]
    ours = load(reference.path, dtype).module
    theirs = type(ours).from_pretrained(reference.path, dtype=dtype)
    if model_type == "phi3":
        theirs.model.rotary_emb = ours.model.rotary_emb
    for listing in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(ours, listing)()), dict(getattr(theirs, listing)())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].dtype == tensor.dtype
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("model_type", ALL)
def test_pickles_are_refused(model_type: str, families: dict[str, FamilyReference], tmp_path: Path) -> None:
    """A checkpoint that has only a pickle is refused by the file's name; the pickle is not opened."""
    directory = copy_of(families[model_type], tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load(directory)


@pytest.mark.parametrize("model_type", ALL)
def test_code_of_a_checkpoint_never_runs(model_type: str, families: dict[str, FamilyReference], tmp_path: Path) -> None:
    """Code beside the weights is refused, or left alone where it is the first publication of this very type."""
    marker = tmp_path / "ran"
    for named in ("modeling_own.OwnForCausalLM", *FAMILIES[model_type].original_code):
        remote = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": named}
        directory = copy_of(families[model_type], tmp_path / named, auto_map=remote)
        for file in (named.split(".")[0], "configuration_own"):
            (directory / f"{file}.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit\n")
        if named in FAMILIES[model_type].original_code:
            CausalModel(load(directory))
        else:
            with pytest.raises(ModelError, match="auto_map="):
                load(directory)
    assert not marker.exists()


@pytest.mark.parametrize("model_type", [*sorted(REFUSED), "unheard", None, 3])
def test_types_outside_the_table_are_refused_with_the_reason(model_type: object) -> None:
    """Every other model type is refused by name; where the reason is known the message gives it."""
    with pytest.raises(ModelError, match=r"model_type=.*llama.*qwen3") as caught:
        family_of(model_type, "some model")
    assert REFUSED.get(str(model_type), "") in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True.*see tokens after them"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0.*does not apply"),
        ("qwen2", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "sliding_window=None"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window=None"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_settings_the_hook_does_not_cover(model_type: str, changes: dict[str, Any], message: str) -> None:
    """Masks that are more than a causal window, and windows that are named but absent, are refused by the setting."""
    with pytest.raises(ModelError, match=message):
        FAMILIES[model_type].check(config_of(model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "layer_types"),
    [
        ("llama", ["sliding_attention", "full_attention"]),
        ("mistral", ["sliding_attention", "full_attention"]),
        ("olmo3", ["chunked_attention", "full_attention"]),
        ("gpt_oss", ["full_attention"]),
        ("cohere2", ["linear_attention", "full_attention"]),
    ],
)
def test_layer_types_that_are_not_computed(model_type: str, layer_types: list[str]) -> None:
    """Layer types the family's masks do not have, such as chunked attention, or that contradict it are refused."""
    config = config_of(model_type)
    config.layer_types = layer_types
    with pytest.raises(ModelError, match="layer_types="):
        FAMILIES[model_type].layer_windows(config)


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("llama", (None, None)),
        ("mistral", (7, 7)),
        ("phi3", (7, 7)),
        ("mixtral", (8, 8)),
        ("qwen3_moe", (6, 6)),
        ("qwen2", (None, 5, 5)),
        ("qwen3", (None, 6, 6)),
        ("qwen2_moe", (5, None)),
        ("gemma2", (5, None)),
        ("gemma3_text", (4, None)),
        ("olmo3", (6, None)),
        ("smollm3", (None, 5, None)),
        ("cohere2", (6, None)),
        ("gpt_oss", (5, None)),
    ],
)
def test_windows_come_from_the_configuration(
    model_type: str, windows: tuple[int | None, ...], families: dict[str, FamilyReference]
) -> None:
    """Each layer's window, also where the module never names it, reaches the kernel's descriptor."""
    model = CausalModel(load(families[model_type].path))
    assert tuple(descriptor.window for descriptor in model.descriptors) == windows
    keys = ["attention:full/verify" if window is None else "attention:sliding/verify" for window in windows]
    assert [descriptor.verify_key for descriptor in model.descriptors] == keys
    assert [descriptor.has_sinks for descriptor in model.descriptors] == [model_type == "gpt_oss"] * len(windows)


def hooked(reference: FamilyReference) -> Any:
    module = load(reference.path).module
    module.set_attn_implementation(HOOK_NAME)
    return module


def silence(module: Any) -> None:
    """One layer's attention does not go through the interface."""
    module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def repeat(module: Any) -> None:
    """One layer attends twice."""
    attention = module.model.layers[0].self_attn
    real = attention.forward
    attention.forward = lambda *args, **kwargs: (real(*args, **kwargs), real(*args, **kwargs))[1]


def extra_argument(module: Any) -> None:
    """One layer gives the hook an argument it does not know."""
    attention = module.model.layers[0].self_attn
    real = attention.forward
    attention.forward = lambda *args, **kwargs: real(*args, **kwargs, position_bias=torch.zeros(1))


def own_mask(module: Any) -> None:
    """One layer has a mask of its own."""
    attention = module.model.layers[0].self_attn
    real = attention.forward
    attention.forward = lambda *args, **kwargs: real(*args, **(kwargs | {"attention_mask": torch.zeros(1, 1, 1, 1)}))


def attributes(**values: Any) -> Callable[[Any], None]:
    """The first layer's attention has other attributes."""
    return lambda module: vars(module.model.layers[0].self_attn).update(values)


def outside(module: Any) -> None:
    """Attention outside the decoder blocks."""
    import copy

    extra = copy.deepcopy(module.model.layers[0].self_attn)
    real = module.model.norm.forward
    cos = torch.zeros(1, 1, 8)
    module.model.norm.forward = lambda x: real(extra(x, position_embeddings=(cos, cos), attention_mask=None)[0])


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", silence, "layer 1 calls it 0 times"),
        ("llama", repeat, "layer 0 calls it 2 times"),
        ("llama", extra_argument, r"\['position_bias'\]"),
        ("llama", own_mask, r"\['attention_mask'\]"),
        ("llama", attributes(is_causal=False), r"\['is_causal'\]"),
        ("llama", outside, "attention module='LlamaAttention'"),
        ("gpt_oss", attributes(sliding_window=6), "sliding_window of layer 0 of 'gpt_oss'=6.*5, as the config says"),
        ("gpt_oss", attributes(sliding_window=None), "sliding_window of layer 0 of 'gpt_oss'=None"),
        ("qwen2", attributes(sliding_window=5), "sliding_window of layer 0 of 'qwen2'=5"),
        ("gemma2", attributes(attn_logit_softcapping=3.0), "softcap of layer 0 of 'gemma2'=3.0"),
    ],
)
def test_layers_that_attend_otherwise_are_refused(
    model_type: str, change: Callable[[Any], None], message: str, families: dict[str, FamilyReference]
) -> None:
    """A probe forward shows what each layer asks of the hook; anything else than the configuration says is refused."""
    module = hooked(families[model_type])
    change(module)
    with pytest.raises(ModelError, match=message):
        install_layers(module, FAMILIES[model_type], ForwardContext())


@pytest.mark.parametrize(("model_type", "entry"), [("gpt_oss", "llama"), ("llama", "gpt_oss")])
def test_sinks_the_table_does_not_expect(model_type: str, entry: str, families: dict[str, FamilyReference]) -> None:
    """Sinks where the table has none, or none where it has some, are refused."""
    import dataclasses

    module = hooked(families[model_type])
    family = dataclasses.replace(FAMILIES[model_type], has_sinks=FAMILIES[entry].has_sinks)
    with pytest.raises(ModelError, match=f"sinks of layer 0 of '{model_type}'"):
        install_layers(module, family, ForwardContext())


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_experts_that_do_not_fit(model_type: str, families: dict[str, FamilyReference], tmp_path: Path) -> None:
    """A missing, surplus or mis-shaped projection of one expert is refused by its stored name."""
    family = FAMILIES[model_type]
    assert family.experts is not None
    ending = f".{family.expert_block}.experts.3.{family.experts[1]}.weight"
    weights = load_file(Path(families[model_type].path) / "model.safetensors")
    name = next(stored for stored in weights if stored.endswith(ending))
    whole = next(
        own for own in load(families[model_type].path).module.state_dict() if own.endswith("experts.down_proj")
    )
    changes: list[tuple[Callable[[Weights], object], str]] = [
        (lambda weights: weights.pop(name), rf"{name.partition('.')[2]}.*missing"),
        (lambda weights: weights.update({name.replace(".3.", ".6."): weights[name].clone()}), r"experts\.6\..*not use"),
        (lambda weights: weights.update({name: weights[name][1:]}), rf"{name}=.*as the config says"),
        (lambda weights: weights.update({whole: torch.zeros(6, 32, 24)}), "not both"),
    ]
    for i, (change, message) in enumerate(changes):
        directory = copy_of(families[model_type], tmp_path / str(i))
        change_weights(directory, change)
        with pytest.raises(ModelError, match=message):
            load(directory)


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_experts_stored_together_or_apart(
    model_type: str, families: dict[str, FamilyReference], tmp_path: Path
) -> None:
    """A checkpoint with one tensor for all experts loads like one with a tensor for each."""
    apart = load(families[model_type].path).module
    stored = load_file(Path(families[model_type].path) / "model.safetensors")
    assert any(f".experts.5.{FAMILIES[model_type].experts[2]}." in name for name in stored)  # type: ignore[index]
    directory = copy_of(families[model_type], tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in apart.state_dict().items()}, tmp_path / "model.safetensors"
    )
    together = load(directory).module.state_dict()
    assert all(torch.equal(together[name], tensor) for name, tensor in apart.state_dict().items())


def test_layers_for_multi_token_prediction_are_left_out(families: dict[str, FamilyReference], tmp_path: Path) -> None:
    """Extra layers that the configuration announces are not loaded; without the announcement they are unexpected."""
    extra = {"model.layers.2.enorm.weight": torch.zeros(32)}
    for count in (1, 0):
        directory = copy_of(families["deepseek_v3"], tmp_path / str(count), num_nextn_predict_layers=count)
        change_weights(directory, lambda weights: weights.update(extra))
        if count:
            load(directory)
        else:
            with pytest.raises(ModelError, match=r"layers\.2\.enorm"):
                load(directory)


def test_huge_expert_counts_are_refused_at_once(families: dict[str, FamilyReference], tmp_path: Path) -> None:
    """An absurd number of experts is refused by the first missing names, without counting to the end."""
    directory = copy_of(families["mixtral"], tmp_path, num_local_experts=10**9)
    with pytest.raises(ModelError, match=r"weights=.*experts\.6\.w1.*missing|weight="):
        load(directory)


def test_tiny_models_of_all_families(families: dict[str, FamilyReference]) -> None:
    """The tiny models are worth testing with: greedy texts differ and use many tokens."""
    for model_type in ALL:
        texts = [families[model_type].generate(prompt, 24) for prompt in ([5, 9, 33, 2], [60], [7, 8, 9])]
        assert len({token for text in texts for token in text}) >= 16, (model_type, texts)
        assert len({tuple(text) for text in texts}) == 3


def test_every_family_has_a_tiny_model(tmp_path: Path) -> None:
    """The test suite can make a checkpoint of every type of the table, the same one each time."""
    for model_type in ALL:
        tiny_model(tmp_path / "a", model_type)
        first = (tmp_path / "a" / "model.safetensors").read_bytes()
        tiny_model(tmp_path / "b", model_type)
        assert (tmp_path / "b" / "model.safetensors").read_bytes() == first
