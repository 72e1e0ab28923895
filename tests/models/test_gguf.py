"""Reading GGUF files: exact weights and configuration, and a `ModelError` for anything corrupt."""

from __future__ import annotations

import contextlib
import functools
import shutil
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specround.contract.errors import ModelError
from specround.models.gguf import GgufModel
from specround.models.gguf_header import read_gguf_header
from specround.models.pretrained import load_pretrained
from specround.models.sources import resolve_model
from tiny_models import llama_config, llama_weights, tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def read_everything(path: Path) -> None:
    """What a load does: header, configuration, module, every tensor, tokenizer."""
    load_pretrained(resolve_model(str(path)), torch.float32, CPU)


@pytest.mark.parametrize("tie", [True, False])
def test_float32_file_gives_the_original_weights_and_config(tmp_path: Path, tie: bool) -> None:
    """Names, rotary rows, shapes, values and configuration come back exactly as they went in."""
    model = GgufModel(tiny_gguf(tmp_path / "a.gguf", quant="F32", tie=tie, layers=2))
    config = llama_config(280, 32, 2, 4, 2, 256, tie, 2)
    original = llama_weights(config, seed=0)
    read = dict(model.tensors())
    assert read.keys() == original.keys() == model.shapes.keys()
    assert all(torch.equal(read[name], original[name]) for name in original)
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    assert model.config | {"pad_token_id": None} == config | {"rope_parameters": rope, "pad_token_id": None}
    assert model.eos_token_ids == (2,)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_dequantises_as_the_gguf_package_reads(tmp_path: Path, quant: str) -> None:
    """Every value equals that of the gguf package's own reader, an independent path to the bytes."""
    import gguf

    path = tiny_gguf(tmp_path / "a.gguf", quant=quant)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    read = dict(GgufModel(path).tensors())
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    }.items():
        expected = gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert np.array_equal(read[ours].numpy(), expected)


def test_header_equals_the_gguf_package_reader(tiny: Path) -> None:
    """Metadata, shapes and byte positions agree with the gguf package's own reader."""
    import gguf

    header, reader = read_gguf_header(tiny), gguf.GGUFReader(tiny)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.start, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))


def test_metadata_types(tmp_path: Path) -> None:
    """Every scalar type and the arrays of strings, numbers and flags are read as Python values."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("b", True)
    writer.add_array("strings", ["a", "é"])
    writer.add_array("flags", [True, False])
    writer.add_array("numbers", [1, -2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    expected = {f"u{bits}": 2**bits - 1 for bits in (8, 16, 32, 64)}
    expected |= {f"i{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)}
    assert {key: metadata[key] for key in expected} == expected
    assert [metadata[key] for key in ("f32", "f64", "b", "strings", "flags", "numbers")] == [
        0.5,
        0.1,
        True,
        ["a", "é"],
        [True, False],
        [1, -2],
    ]


def test_smollm2_equals_transformers_load(smollm2: GgufModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight and the logits equal bit for bit what transformers' own GGUF reader makes of the file."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # transformers builds this table again for each of 397 modules, which takes half of its time
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    source = resolve_model("smollm2")
    ours = load_pretrained(source, torch.float32, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = load_gguf_checkpoint(source.path, return_tensors=True, model_to_load=ours.module)
        theirs = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig(**read["config"]), state_dict=read["tensors"], dtype=torch.float32
        )
    expected, found = theirs.state_dict(), ours.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert ours.tokenizer is not None
    ids = torch.tensor([ours.tokenizer.encode("The number 12345 is followed by")])
    with torch.inference_mode():
        assert torch.equal(ours.module(ids).logits, theirs(ids).logits)
    assert (ours.eos_token_ids, ours.max_position_embeddings) == ((2,), 8192)
    assert ours.module.lm_head.weight is ours.module.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"llama.attention.head_count": 5}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "head_count"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.block_count": 2**31 - 1}, "num_hidden_layers"),
        ({"llama.block_count": 2}, r"weights=.*missing"),
        ({"llama.feed_forward_length": 65}, r"weight=.*config says"),
        ({"llama.embedding_length": 64}, "rope.dimension_count"),
        ({"llama.context_length": 0}, "context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "rms_epsilon"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base"),
        ({"split.count": 3}, "split.count"),
        ({"general.alignment": 24}, "alignment"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "llama"}, r"add_space_prefix=None.*space before the text"),
        ({"tokenizer.ggml.pre": "unheard-of"}, r"tokenizer.ggml.pre.*smollm"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, int | float | str], message: str
) -> None:
    """Sizes that contradict the tensors and features that are not computed are refused, naming the key."""
    path = tiny_gguf(tmp_path / "a.gguf", overrides=overrides)
    with pytest.raises(ModelError, match=message):
        read_everything(path)


def test_unknown_architecture_lists_the_supported(tmp_path: Path) -> None:
    """Another architecture is refused by name, with the list of supported ones."""
    with pytest.raises(ModelError, match=r"general.architecture='mamba'.*llama"):
        GgufModel(tiny_gguf(tmp_path / "a.gguf", architecture="mamba"))


def put(layout: str, position: int, value: int) -> Callable[[bytearray], None]:
    """A corruption: overwrite one number."""
    return lambda data: struct.pack_into(layout, data, position, value)


def tensor_entry(data: bytearray, name: bytes) -> int:
    """Position just after a tensor's name in the header."""
    return data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


HUGE = 2**63 + 1
CORRUPTIONS: dict[str, Callable[[bytearray], None]] = {
    "magic": lambda data: data.__setitem__(slice(0, 4), b"GGML"),
    "version 1": put("<I", 4, 1),
    "version 99": put("<I", 4, 99),
    "big endian": put(">I", 4, 3),
    "tensor count": put("<Q", 8, HUGE),
    "tensor count one more": lambda data: struct.pack_into("<Q", data, 8, struct.unpack_from("<Q", data, 8)[0] + 1),
    "metadata count": put("<Q", 16, HUGE),
    "metadata count all of the file": lambda data: struct.pack_into("<Q", data, 16, len(data) // 13),
    "key length": put("<Q", 24, HUGE),
    "value type": lambda data: struct.pack_into("<I", data, 24 + 8 + len("general.architecture"), 77),
    "key not UTF-8": lambda data: data.__setitem__(32, 0xFF),
    "array length": lambda data: struct.pack_into(
        "<Q", data, data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8, HUGE
    ),
    "array of arrays": lambda data: struct.pack_into(
        "<I", data, data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 4, 9
    ),
    "dimensions": lambda data: struct.pack_into("<I", data, tensor_entry(data, b"token_embd.weight"), 2**31),
    "no dimensions": lambda data: struct.pack_into("<I", data, tensor_entry(data, b"token_embd.weight"), 0),
    "dimension zero": lambda data: struct.pack_into("<Q", data, tensor_entry(data, b"token_embd.weight") + 4, 0),
    "dimension overflow": lambda data: struct.pack_into(
        "<QQ", data, tensor_entry(data, b"token_embd.weight") + 4, 2**33, 2**33
    ),
    "storage type": lambda data: struct.pack_into("<I", data, tensor_entry(data, b"token_embd.weight") + 20, 999),
    "offset beyond the file": lambda data: struct.pack_into(
        "<Q", data, tensor_entry(data, b"token_embd.weight") + 24, 2**40
    ),
    "offset overflow": lambda data: struct.pack_into(
        "<Q", data, tensor_entry(data, b"token_embd.weight") + 24, 2**64 - 32
    ),
    "offset misaligned": lambda data: struct.pack_into("<Q", data, tensor_entry(data, b"token_embd.weight") + 24, 8),
    "overlap": lambda data: struct.pack_into("<Q", data, tensor_entry(data, b"output_norm.weight") + 16, 32),
    "duplicate tensor": lambda data: data.__setitem__(
        slice(data.index(b"blk.0.attn_k"), data.index(b"blk.0.attn_k") + 12), b"blk.0.attn_q"
    ),
    "unknown tensor": lambda data: data.__setitem__(
        slice(data.index(b"blk.0.attn_k"), data.index(b"blk.0.attn_k") + 12), b"blk.0.attn_x"
    ),
}


@pytest.mark.parametrize("corruption", list(CORRUPTIONS))
def test_corrupt_headers_are_refused_without_big_allocations(tiny: Path, tmp_path: Path, corruption: str) -> None:
    """Each broken count, length, type, shape or offset is a ModelError, before memory for it is asked for."""
    data = bytearray(tiny.read_bytes())
    CORRUPTIONS[corruption](data)
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            GgufModel(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_the_uncorrupted_file_loads(tiny: Path) -> None:
    """Positive control for the corruption tests: the same file, untouched, loads."""
    read_everything(tiny)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    """A path that cannot be read as a file is a ModelError."""
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelError):
            GgufModel(path)


def test_file_that_shrinks_after_the_header_was_read(tiny: Path, tmp_path: Path) -> None:
    """Weights that vanish between opening and reading are a ModelError that names the tensor."""
    path = tmp_path / "a.gguf"
    shutil.copy(tiny, path)
    model = GgufModel(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="weight="):
        list(model.tensors())


@given(st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_anywhere_is_refused(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Cut at any byte, the file is refused with a ModelError and nothing else."""
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, _last_needed_byte(tiny) - 1))])
    with pytest.raises(ModelError):
        read_everything(path)


@given(st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bytes_load_or_are_refused(tiny: Path, tmp_path: Path, data: st.DataObject) -> None:
    """With any bytes changed, mostly in the header, the file loads or is a ModelError: no other error, no warning."""
    changed = bytearray(tiny.read_bytes())
    header_end = min(tensor.start for tensor in read_gguf_header(tiny).tensors.values())
    positions = st.one_of(st.integers(0, 1200), st.integers(0, header_end - 1), st.integers(0, len(changed) - 1))
    for position in data.draw(st.lists(positions, min_size=1, max_size=3)):
        changed[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(changed)
    with contextlib.suppress(ModelError):
        read_everything(path)


def _last_needed_byte(path: Path) -> int:
    return max(tensor.start + tensor.num_bytes for tensor in read_gguf_header(path).tensors.values())
