"""Read a GGUF file as a Hugging Face configuration, named float32 weights and a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specround.contract.errors import ModelError
from specround.models.gguf_architectures import ARCHITECTURES, Metadata
from specround.models.gguf_header import GgufTensor, read_gguf_header
from specround.models.gguf_tokenizer import tokenizer_from_metadata
from specround.models.tokenizer import Tokenizer

_BLOCK_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)", re.ASCII)


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
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ModelError("general.architecture", name, f"one of {sorted(ARCHITECTURES)}")
        self._architecture = ARCHITECTURES[name]
        self._metadata = Metadata(self._header.metadata, name)
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
        """Undo the interleaving of rotary pairs, (head, pair, half) to (head, half, pair), and the offset of norms."""
        if name.endswith("norm.weight"):
            return weight - self._architecture.norm_offset
        if not self._architecture.interleaved_rotary or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return weight
        heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        pairs = weight.shape[0] // heads // 2
        return weight.view(heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


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
