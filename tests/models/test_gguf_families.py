"""GGUF files of other architectures than llama: weights, configuration, text and tokenizers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from family_reference import FamilyReference
from gguf_families import SPACE, spm_metadata, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from specround import LLM, SamplingParams
from specround.contract.errors import ModelError
from specround.models.gguf import GgufModel
from specround.models.gguf_tokenizer import tokenizer_from_metadata
from specround.models.pretrained import Pretrained, load_pretrained
from specround.models.sources import resolve_model
from specround.models.tokenizer import Tokenizer
from tiny_models import byte_level_vocabulary, tiny_model

CPU = torch.device("cpu")
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"vocab_size": 280, "use_sliding_window": False},
    "gemma3": {
        "vocab_size": 400,
        "num_hidden_layers": 7,
        "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
}
MODEL_TYPES = {"qwen2": "qwen2", "gemma3": "gemma3_text"}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> FamilyReference:
    path = tmp_path_factory.mktemp(architecture)
    return FamilyReference(tiny_model(path, MODEL_TYPES[architecture], **CONFIGS[architecture]))


@pytest.fixture(scope="module")
def file(architecture: str, reference: FamilyReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", architecture, reference)


def load(path: Path) -> Pretrained:
    return load_pretrained(resolve_model(str(path)), torch.float32, CPU)


def test_weights_and_logits_are_the_originals(file: Path, reference: FamilyReference) -> None:
    """Names, norms, windows, rotary bases and scales come back: weights within a rounding, logits and text equal."""
    ours = load(file)
    expected = reference.module.state_dict()
    found = ours.module.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name
    ids = torch.tensor([list(range(4, 40))])
    with torch.inference_mode():
        error = (ours.module(ids).logits - reference.module(ids).logits).abs().max()
    assert error <= 1e-4 * reference.run(ids[0].tolist()).logits.abs().max()
    llm = LLM(str(file), max_model_len=64)
    prompt = list(range(30, 40))
    text = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert text[0].outputs[0].token_ids == reference.generate(prompt, 24)


def test_weights_equal_the_reading_of_transformers(file: Path) -> None:
    """Every weight equals bit for bit what transformers' own GGUF reader makes of the same file."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = load(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=ours.module)["tensors"]
    found = ours.module.state_dict()
    assert {name for name in found if name != "lm_head.weight"} <= theirs.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.items())


def test_the_configuration_is_the_originals(file: Path, reference: FamilyReference) -> None:
    """Every entry the file's configuration has equals that of the original."""
    ours, expected = load(file).config.to_dict(), reference.module.config.to_dict()
    given_by_file = GgufModel(file).config.keys() - {"architectures", "pad_token_id", "bos_token_id", "eos_token_id"}
    differing = {key: (ours[key], expected[key]) for key in given_by_file if ours[key] != expected[key]}
    assert not differing


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("qwen2", {"qwen2.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ("qwen2", {"qwen2.attention.sliding_window": 16}, "sliding_window"),
        ("qwen2", {"qwen2.attention.key_length": 16}, "key_length"),
        ("qwen2", {"qwen2.attention.head_count": 3}, "head_count"),
        ("gemma3", {"gemma3.rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"gemma3.attention.sliding_window": None}, "sliding_window"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "head_count"),
        ("gemma3", {"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix"),
        ("gemma3", {"tokenizer.ggml.scores": [0.0]}, "scores"),
        ("gemma3", {"tokenizer.ggml.token_type": None}, "token_type"),
    ],
    indirect=["architecture"],
)
def test_metadata_that_is_not_computed_is_refused(
    architecture: str, reference: FamilyReference, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    """Scalings, windows and tokenizers that would change the result are refused by their key."""
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "a.gguf", architecture, reference, overrides))


def test_linear_scaling_applies_to_full_attention_only(tmp_path: Path) -> None:
    """A scaling factor in the file stretches the layers with full attention; a soft cap of the logits is taken."""
    reference = FamilyReference(tiny_model(tmp_path / "m", "gemma3_text", **CONFIGS["gemma3"]))
    overrides = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.final_logit_softcapping": 30.0,
    }
    config = load(write_gguf(tmp_path / "a.gguf", "gemma3", reference, overrides)).config
    assert config.rope_parameters[FULL] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert config.rope_parameters[SLIDING] == {"rope_type": "default", "rope_theta": 1e4}
    assert config.final_logit_softcapping == 30.0


def qwen2_tokenizers() -> tuple[Tokenizer, Any]:
    from transformers import Qwen2Tokenizer

    tokens, merges = byte_level_vocabulary(280)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    return tokenizer_from_metadata(metadata, 280), theirs


def gemma3_tokenizers() -> tuple[Tokenizer, Any]:
    from transformers import GemmaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    metadata = spm_metadata(400)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind != 1}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, scores, normal))
    theirs.add_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 4])
    return tokenizer_from_metadata(metadata, 400), theirs


TOKENIZERS = {"qwen2": qwen2_tokenizers(), "gemma3": gemma3_tokenizers()}
LETTERS = "abcdefghijklmnopqrstuvwxyz.,'0123456789é \n"
TEXTS = ["the world and  the   other\n\n11 thing", "I'LL  do it's 1234, é\r\n x", "日本語 🙂 e\u0301", "", " ", "   a"]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(text=st.one_of(st.text(max_size=30), st.text(alphabet=LETTERS, max_size=40), st.sampled_from(TEXTS)))
@settings(max_examples=150, deadline=None)
def test_tokenizers_split_as_those_of_transformers(name: str, text: str) -> None:
    """Any text has the ids that transformers' own tokenizer class makes of the same vocabulary."""
    ours, theirs = TOKENIZERS[name]
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [text for text in TEXTS if SPACE not in text])
def test_sentencepiece_round_trips(text: str) -> None:
    """Decoding gives the text back, runs of spaces and characters outside the vocabulary included."""
    ours = TOKENIZERS["gemma3"][0]
    assert ours.decode(ours.encode(text)) == text
    assert ours.encode(text)[0] == ours.bos_token_id == 2


def test_ids_that_end_a_turn(tmp_path: Path) -> None:
    """End of text and end of turn both end a generation."""
    reference = FamilyReference(tiny_model(tmp_path / "m", "gemma3_text", **CONFIGS["gemma3"]))
    assert load(write_gguf(tmp_path / "a.gguf", "gemma3", reference)).eos_token_ids == (1, 4)
