"""Read a GGUF file as a Hugging Face configuration, named float32 weights and a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from specround.contract.errors import ModelError
from specround.models.gguf_header import GgufTensor, read_gguf_header
from specround.models.gguf_tokenizer import tokenizer_from_metadata
from specround.models.tokenizer import Tokenizer

_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 3e38
_BLOCK_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """How one `general.architecture` maps to a Hugging Face model type.

    Attributes:
        model_type: The Hugging Face type.
        config: Metadata to the keys of `config.json` that only this architecture has.
        names: The file's module names to Hugging Face's.
        block_names: The same, inside a layer.
        interleaved_rotary: Query and key rows are stored as interleaved pairs and must be put back into halves.
    """

    model_type: str
    config: Callable[[_Metadata], dict[str, Any]]
    names: Mapping[str, str]
    block_names: Mapping[str, str]
    interleaved_rotary: bool


class GgufModel:
    """One GGUF file: a `WeightSource` with a configuration and a tokenizer.

    The header is read and checked when the object is made; weights are read by `tensors`, one at a time.

    Args:
        path: The file.

    Raises:
        ModelError: A corrupt file, or an architecture, tokenizer or storage type that is not supported; names it.

    Example:
        >>> model = GgufModel(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))
        >>> model.config["hidden_size"], model.shapes["model.norm.weight"]
        (576, (576,))
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = read_gguf_header(path)
        name = self._header.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise ModelError("general.architecture", name, f"one of {sorted(_ARCHITECTURES)}")
        self._architecture = _ARCHITECTURES[name]
        self._metadata = _Metadata(self._header.metadata, name)
        if self._metadata.get_integer("split.count", 1, prefixed=False) > 1:
            raise ModelError("split.count", self._header.metadata["split.count"], "1: join the parts into one file")
        self._by_name = {self._hf_name(tensor.name): tensor for tensor in self._header.tensors.values()}

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the model's `config.json` would say."""
        embedding = self.shapes.get("model.embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelError("token_embd.weight", embedding, "a matrix with one row per token")
        token_ids = {
            f"{role}_token_id": self._header.metadata.get(f"tokenizer.ggml.{key}")
            for role, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "padding_token_id"))
        }
        return {
            "model_type": self._architecture.model_type,
            "vocab_size": embedding[0],
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            **token_ids,
            **self._architecture.config(self._metadata),
        }

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation: end of text and, where the file names one, end of turn."""
        found = [self._header.metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return {name: tensor.shape for name, tensor in self._by_name.items()}

    def location(self, name: str) -> str:
        """See `WeightSource`."""
        return f"{self._path.name}: {self._by_name[name].name}"

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`; every tensor is dequantised to float32."""
        with self._path.open("rb") as file:
            for name, tensor in self._by_name.items():
                file.seek(tensor.start)
                raw = np.fromfile(file, dtype=np.uint8, count=tensor.num_bytes)
                if raw.size != tensor.num_bytes:
                    raise ModelError(name, f"{raw.size} bytes", f"{tensor.num_bytes} bytes in {self._path}")
                yield name, self._restore_rows(name, _dequantize(tensor, raw))

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """The tokenizer, for a model with `vocab_size` embedding rows.

        Raises:
            ModelError: An unsupported kind of tokenizer, or a vocabulary that does not fit together.
        """
        return tokenizer_from_metadata(self._header.metadata, vocab_size)

    def _hf_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if module in self._architecture.names and kind == "weight":
            return f"{self._architecture.names[module]}.{kind}"
        match = _BLOCK_NAME.fullmatch(name)
        if match and match[2] in self._architecture.block_names:
            return f"model.layers.{int(match[1])}.{self._architecture.block_names[match[2]]}.{match[3]}"
        raise ModelError(name, "unknown", f"a tensor of the {self._architecture.model_type} architecture")

    def _restore_rows(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Undo the interleaving of rotary pairs: rows (head, pair, half) become (head, half, pair)."""
        if not self._architecture.interleaved_rotary or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return weight
        heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        pairs = weight.shape[0] // heads // 2
        return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


class _Metadata:
    """Typed access to metadata; keys are given without the architecture's prefix."""

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        self._values, self._architecture = values, architecture

    def integer(self, key: str) -> int:
        """An integer from 1 to 2**31 - 1 that the file must have."""
        name = f"{self._architecture}.{key}"
        value = self._values.get(name)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise ModelError(name, value, f"an integer from 1 to {_MAX_SIZE}")
        return value

    def get_integer(self, key: str, default: int, *, prefixed: bool = True) -> int:
        """An integer from 0 to 2**31 - 1, or the default when the file has none."""
        name = f"{self._architecture}.{key}" if prefixed else key
        value = self._values.get(name, default)
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            raise ModelError(name, value, f"an integer from 0 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 that float32 can hold."""
        name = f"{self._architecture}.{key}"
        value = self._values.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
            raise ModelError(name, value, f"a number above 0 and at most {_MAX_NUMBER:g}")
        return float(value)

    def refuse(self, key: str, allowed: tuple[object, ...]) -> None:
        """Raise unless the file lacks the key or gives one of the allowed values."""
        name = f"{self._architecture}.{key}"
        value = self._values.get(name)
        if value is not None and value not in allowed:
            raise ModelError(name, value, f"absent or one of {list(allowed)}")


def _llama_config(metadata: _Metadata) -> dict[str, Any]:
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    kv_heads = metadata.get_integer("attention.head_count_kv", heads)
    head_dim = metadata.get_integer("attention.key_length", hidden // heads)
    if hidden % heads or kv_heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
        sizes = f"{heads} heads, {kv_heads} key-value heads of {head_dim} for {hidden}"
        raise ModelError("llama.attention.head_count", sizes, "divisors of each other with an even head size")
    metadata.refuse("attention.value_length", (head_dim,))
    metadata.refuse("rope.dimension_count", (head_dim,))
    metadata.refuse("rope.scaling.type", ("none",))
    metadata.refuse("expert_count", (0,))
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": _shortest(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(metadata.number("rope.freq_base", 10000.0)),
        },
        "attention_bias": False,
        "mlp_bias": False,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


_ARCHITECTURES: Final = {
    "llama": _Architecture(
        model_type="llama",
        config=_llama_config,
        names={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        block_names={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved_rotary=True,
    ),
}


def _dequantize(tensor: GgufTensor, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """Float32 values of a stored tensor, as the gguf package computes them."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    try:
        with np.errstate(all="ignore"):
            values = dequantize(raw.reshape(-1, tensor.row_bytes), kind)
    except NotImplementedError as error:
        raise ModelError(tensor.name, kind.name, "a storage type the gguf package can convert to float32") from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape))
