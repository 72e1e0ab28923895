"""Loading directories: exact and complete weights, or a `ModelError` that names what is wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specround.contract.errors import ModelError
from specround.models.families import FAMILIES
from specround.models.pretrained import SUPPORTED_MODEL_TYPES, Pretrained, load_pretrained, resolve_dtype
from specround.models.sources import resolve_model
from tiny_models import tiny_gguf, tiny_llama

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Pretrained:
    return load_pretrained(resolve_model(str(directory)), dtype, CPU)


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory: Path, change: Callable[[Weights], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def shard(directory: Path) -> dict[str, str]:
    """Split the weights into two files with an index; returns the index's map."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = list(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: weights[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_equals_transformers_loading(tmp_path: Path, tie: bool, stored: torch.dtype) -> None:
    """Weights, rotary tables and logits equal bit for bit those of `from_pretrained`; tied weights stay one tensor."""
    from transformers import LlamaForCausalLM

    tiny_llama(tmp_path, tie=tie, dtype=stored)
    ours, theirs = load(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected, found = theirs.state_dict(), ours.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(ours.module.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    ids = torch.arange(4, 40)[None]
    with torch.inference_mode():
        assert torch.equal(ours.module(ids).logits, theirs(ids).logits)
    assert (ours.module.lm_head.weight is ours.module.model.embed_tokens.weight) == tie


def test_module_is_ready_for_inference(tmp_path: Path) -> None:
    """Eval mode, no gradients, the asked type and device, no tensor left unfilled or sharing the file's memory."""
    loaded = load(tiny_llama(tmp_path), torch.bfloat16)
    assert not loaded.module.training
    for tensor in [*loaded.module.parameters(), *loaded.module.buffers()]:
        assert not tensor.requires_grad
        assert tensor.device == CPU
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.module.dtype == loaded.config.dtype == torch.bfloat16
    assert loaded.module.model.rotary_emb.inv_freq.dtype == torch.float32
    before = loaded.module.lm_head.weight.clone()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(before, loaded.module.lm_head.weight)
    assert loaded.max_position_embeddings == 256
    assert loaded.tokenizer is None


def test_gguf_and_directory_give_the_same_model(tmp_path: Path) -> None:
    """One set of weights stored in both formats loads to equal modules."""
    directory = load(tiny_llama(tmp_path / "d", with_tokenizer=True, layers=2))
    file = load_pretrained(
        resolve_model(str(tiny_gguf(tmp_path / "a.gguf", quant="F32", tie=False, layers=2))), torch.float32, CPU
    )
    expected, found = directory.module.state_dict(), file.module.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert directory.eos_token_ids == file.eos_token_ids == (2,)
    assert directory.tokenizer is not None
    assert file.tokenizer is not None
    assert directory.tokenizer.vocab_size == file.tokenizer.vocab_size == 280


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    """A sharded checkpoint gives the same module as the single file."""
    whole = load(tiny_llama(tmp_path))
    shard(tmp_path)
    split = load(tmp_path)
    expected = whole.module.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in split.module.state_dict().items())


def test_progress_is_reported_per_tensor(tmp_path: Path) -> None:
    """Every tensor is reported once, in counting order, ending at the total."""
    steps: list[tuple[int, int, str]] = []
    source = resolve_model(str(tiny_llama(tmp_path)))
    load_pretrained(source, torch.float32, CPU, on_progress=lambda done, total, name: steps.append((done, total, name)))
    total = len(load_file(tmp_path / "model.safetensors"))
    assert [step[:2] for step in steps] == [(done, total) for done in range(1, total + 1)]
    assert len({step[2] for step in steps}) == total


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed, even for settings transformers would warn about, and its log level is restored."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    tiny_llama(tmp_path, with_tokenizer=True)
    change_config(tmp_path, torch_dtype="float32", unknown_setting=1, pad_token_id=-1)
    load(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == before


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 3]}, 2, (5, 3)),
        ({"eos_token_id": None}, 2, ()),
        ({}, 2, (2,)),
        (None, [7, 8], (7, 8)),
        (None, None, ()),
    ],
)
def test_eos_token_ids(
    tmp_path: Path, generation: dict[str, object] | None, config: object, expected: tuple[int, ...]
) -> None:
    """The generation settings decide; without an entry there, the configuration does."""
    tiny_llama(tmp_path)
    change_config(tmp_path, eos_token_id=config)
    path = tmp_path / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    assert load(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("wrong", ["x", -1, [2, True], [None], 1.5])
def test_eos_token_ids_of_another_type_are_refused(tmp_path: Path, wrong: object) -> None:
    """An end id that is no id is refused by name."""
    tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelError, match="eos_token_id"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, r"model_type='rwkv'.*llama"),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map="),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"hidden_size": 64}, r"\.weight=.*as the config says.*model.safetensors"),
        ({"hidden_size": 33}, "config.json="),
        ({"hidden_size": "32"}, "config.json="),
        ({"hidden_size": 2**40}, r"\.weight="),
        ({"num_attention_heads": 0}, "config.json="),
        ({"num_hidden_layers": 3}, r"weights=.*layers.2.*missing"),
        ({"num_hidden_layers": 1}, r"weights=.*layers.1.*do not|weights=.*layers.1.*does not use"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers="),
        ({"vocab_size": 65}, r"\.weight="),
        ({"hidden_act": "unheard"}, "config.json="),
        ({"attention_bias": True}, r"weights=.*bias"),
    ],
)
def test_configurations_that_do_not_fit(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    """What is unsupported or contradicts the weights is refused by name; nothing is initialised at random."""
    tiny_llama(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"model.norm.weight.*missing"),
        (lambda weights: weights.pop("lm_head.weight"), r"lm_head.weight.*missing"),
        (lambda weights: weights.update(extra=torch.zeros(3)), "extra"),
        (lambda weights: weights.update({EMBEDDING: torch.zeros(64, 31)}), r"embed_tokens.weight=\(64, 31\)"),
        (lambda weights: weights.update({EMBEDDING: torch.zeros(64, 32, dtype=torch.int8)}), "quantised"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, change: Callable[[Weights], object], message: str) -> None:
    """A missing, unexpected, mis-shaped or integer weight is refused by its name."""
    change_weights(tiny_llama(tmp_path), change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_stored_rotary_tables_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints store rotary tables per layer; they are recomputed from the configuration."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(tiny_llama(tmp_path), lambda weights: weights.update({name: torch.zeros(4)}))
    assert load(tmp_path).module.model.rotary_emb.inv_freq[0] == 1.0


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight"])
def test_tied_weights_stored_once_or_twice(tmp_path: Path, name: str) -> None:
    """A tied checkpoint may store either of the two tensors, or both if they are equal."""
    tiny_llama(tmp_path, tie=True)
    expected = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": expected.clone()}))
    assert torch.equal(load(tmp_path).module.lm_head.weight, expected)
    change_weights(tmp_path, lambda weights: weights.pop(name))
    assert torch.equal(load(tmp_path).module.model.embed_tokens.weight, expected)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    """Two different tensors that the configuration ties are a contradiction, not a choice."""
    tiny_llama(tmp_path, tie=True)
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDING] + 1}))
    with pytest.raises(ModelError, match=r"embed_tokens.weight and lm_head.weight=.*the config ties"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json(tmp_path: Path, file: str, content: bytes) -> None:
    """A JSON file that is empty, cut, not an object, not text or absurdly nested is refused by name."""
    tiny_llama(tmp_path, with_tokenizer=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=file):
        load(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    """A directory without `config.json` is refused, naming the file."""
    tiny_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    """A directory with only a pickle is refused and the pickle is not opened; without weights, both names are given."""
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"a directory with model\.safetensors"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle"):
        load(tmp_path)


def test_shard_problems_are_named(tmp_path: Path) -> None:
    """A missing shard, a wrong listing, a tensor in two shards and an index that points elsewhere are refused."""
    weight_map = shard(tiny_llama(tmp_path))
    name = next(name for name, file in weight_map.items() if file == "a.safetensors")
    for broken, message in [
        (weight_map | {name: "b.safetensors"}, "where model.safetensors.index.json lists it"),
        (weight_map | {name: "absent.safetensors"}, r"absent.safetensors'?=.*present"),
        (weight_map | {name: "../a.safetensors"}, "the name of a .safetensors file"),
        (weight_map | {name: 3}, "the name of a .safetensors file"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ]:
        write_index(tmp_path, broken)
        with pytest.raises(ModelError, match=message):
            load(tmp_path)
    write_index(tmp_path, weight_map)
    load(tmp_path)
    both = load_file(tmp_path / "b.safetensors") | {name: load_file(tmp_path / "a.safetensors")[name]}
    save_file(both, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="in one file only"):
        load(tmp_path)


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_safetensors(tmp_path: Path, data: st.DataObject) -> None:
    """Cut at any byte, the weights are refused with a ModelError and nothing else."""
    tiny_llama(tmp_path, layers=1)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(tmp_path)


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_in_safetensors(tmp_path: Path, data: st.DataObject) -> None:
    """With any bytes changed, mostly in the header, the weights load or are a ModelError: no other error or warning."""
    tiny_llama(tmp_path, layers=1)
    changed = bytearray((tmp_path / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(changed[:8], "little")
    positions = st.one_of(st.integers(0, 8), st.integers(0, header - 1), st.integers(0, len(changed) - 1))
    for position in data.draw(st.lists(positions, min_size=1, max_size=3)):
        changed[position] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b'0123456789",[]{}:FBI'))))
    (tmp_path / "model.safetensors").write_bytes(changed)
    with contextlib.suppress(ModelError):
        load(tmp_path)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_configuration_values(tmp_path: Path, data: st.DataObject) -> None:
    """With any value in any field of the configuration, the model loads or is a ModelError."""
    tiny_llama(tmp_path, layers=1)
    field = data.draw(st.sampled_from(sorted(json.loads((tmp_path / "config.json").read_text()))))
    sizes = st.sampled_from([-1, 0, 1, 3, 31, 2**31, 2**63, 10**30])
    value = data.draw(st.one_of(sizes, st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.lists(sizes)))
    change_config(tmp_path, **{field: value})
    with contextlib.suppress(ModelError):
        load(tmp_path)


def test_resolve_dtype() -> None:
    """With "auto" the type follows the device; names and torch types are taken; others are refused with the list."""
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bfloat16", CPU) == resolve_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    for wrong in ("float64", torch.int8, "", None, 3):
        with pytest.raises(ModelError, match=r"dtype=.*bfloat16"):
            resolve_dtype(wrong, CPU)  # type: ignore[arg-type]


def test_supported_types_have_classes() -> None:
    """Every type of the table can be built: it names a configuration and a module class of transformers."""
    import transformers

    for model_type in SUPPORTED_MODEL_TYPES:
        family = FAMILIES[model_type]
        assert getattr(transformers, family.config_class).model_type == model_type
        assert getattr(transformers, family.model_class).config_class.model_type == model_type


@pytest.mark.parametrize("options", [{}, {"tie": True}, {"with_tokenizer": True}, {"layers": 1}, {"seed": 3}])
def test_tiny_models_do_not_loop(tmp_path: Path, options: dict[str, object]) -> None:
    """The suite's tiny models are worth testing with: greedy outputs use many tokens, differ and do not repeat soon."""
    module = load(tiny_llama(tmp_path, **options)).module  # type: ignore[arg-type]
    outputs = []
    for seed in range(3):
        ids = torch.randint(4, 60, (1, 6), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            for _ in range(48):
                ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], dim=1)
        generated = ids[0, 6:].tolist()
        assert len(set(generated)) >= 16
        assert not any(generated[-12:] == (generated[-period:] * 12)[-12:] for period in range(1, 6))
        outputs.append(tuple(generated))
    assert len(set(outputs)) == 3


def test_tiny_models_are_reproducible(tmp_path: Path) -> None:
    """The same arguments give the same bytes, another seed gives others."""
    content = [
        (tiny_llama(tmp_path / str(index), seed=seed) / "model.safetensors").read_bytes()
        for index, seed in enumerate([0, 0, 1])
    ]
    assert content[0] == content[1] != content[2]
    assert sys.getsizeof(content[0]) > 10_000
