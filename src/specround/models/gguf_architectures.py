"""What the architectures of GGUF files mean: their metadata as a Hugging Face configuration, their tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from specround.contract.errors import ModelError

_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 3e38


class Metadata:
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

    def get_number(self, key: str) -> float | None:
        """A number above 0, or None when the file has none or says 0."""
        value = self._values.get(f"{self._architecture}.{key}")
        return None if value is None or value == 0 else _shortest(self.number(key))

    def text(self, key: str) -> str | None:
        """A string, or None when the file has none."""
        value = self._values.get(f"{self._architecture}.{key}")
        return value if isinstance(value, str) else None

    def misfit(self, sizes: str) -> ModelError:
        """The error for sizes that do not fit each other."""
        name = f"{self._architecture}.attention.head_count"
        return ModelError(name, sizes, "divisors of each other with an even head size")

    def refuse(self, key: str, allowed: tuple[object, ...]) -> None:
        """Raise unless the file lacks the key or gives one of the allowed values."""
        name = f"{self._architecture}.{key}"
        value = self._values.get(name)
        if value is not None and value not in allowed:
            raise ModelError(name, value, f"absent or one of {list(allowed)}")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one `general.architecture` maps to a Hugging Face model type.

    Attributes:
        model_type: The Hugging Face type.
        config: Metadata to the keys of `config.json` that only this architecture has.
        names: The file's module names to Hugging Face's.
        block_names: The same, inside a layer.
        interleaved_rotary: Query and key rows are stored as interleaved pairs and must be put back into halves.
        norm_offset: What the file adds to the weights of every norm.
    """

    model_type: str
    config: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str]
    block_names: Mapping[str, str]
    interleaved_rotary: bool = False
    norm_offset: float = 0.0


def _decoder_config(metadata: Metadata) -> dict[str, Any]:
    """What all architectures share; sizes must fit each other."""
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    kv_heads = metadata.get_integer("attention.head_count_kv", heads)
    head_dim = metadata.get_integer("attention.key_length", hidden // heads)
    if kv_heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise metadata.misfit(f"{heads} heads, {kv_heads} key-value heads of {head_dim} for {hidden}")
    metadata.refuse("attention.value_length", (head_dim,))
    metadata.refuse("rope.dimension_count", (head_dim,))
    metadata.refuse("expert_count", (0,))
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": _shortest(metadata.number("attention.layer_norm_rms_epsilon")),
    }


def _llama_config(metadata: Metadata) -> dict[str, Any]:
    config = _standard_config(metadata)
    head_dim = metadata.get_integer("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": head_dim,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _qwen2_config(metadata: Metadata) -> dict[str, Any]:
    config = _standard_config(metadata)
    metadata.refuse("attention.key_length", (config["hidden_size"] // config["num_attention_heads"],))
    metadata.refuse("attention.sliding_window", (0,))
    return config | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _standard_config(metadata: Metadata) -> dict[str, Any]:
    """Llama and its closest relatives."""
    config = _decoder_config(metadata)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise metadata.misfit(f"{heads} heads for {hidden}")
    metadata.refuse("rope.scaling.type", ("none",))
    theta = _shortest(metadata.number("rope.freq_base", 10000.0))
    return config | {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _gemma3_config(metadata: Metadata) -> dict[str, Any]:
    config = _decoder_config(metadata)
    layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    head_dim = metadata.get_integer("attention.key_length", 256)
    period = metadata.get_integer("attention.sliding_window_pattern", 6)
    if layers > _MAX_LAYERS or period < 1:
        raise metadata.misfit(f"{layers} layers, every {period}th with full attention")
    metadata.refuse("rope.scaling.type", ("none", "linear"))
    metadata.refuse("attn_logit_softcapping", (0.0,))
    full = {"rope_type": "default", "rope_theta": _shortest(metadata.number("rope.freq_base", 1e6))}
    if metadata.text("rope.scaling.type") == "linear":
        full |= {"rope_type": "linear", "factor": _shortest(metadata.number("rope.scaling.factor"))}
    local = {"rope_type": "default", "rope_theta": _shortest(metadata.number("rope.freq_base_swa", 10000.0))}
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        # the file does not say it: of the published sizes only the largest, of 62 layers, differs from the head size
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA3_LARGEST else head_dim,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "final_logit_softcapping": metadata.get_number("final_logit_softcapping"),
        "attention_bias": False,
    }


_MAX_LAYERS = 10_000
_GEMMA3_LARGEST = 62


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ARCHITECTURES: Final = {
    "llama": Architecture(
        model_type="llama",
        config=_llama_config,
        names=_NAMES,
        block_names=_BLOCK_NAMES,
        interleaved_rotary=True,
    ),
    "qwen2": Architecture(model_type="qwen2", config=_qwen2_config, names=_NAMES, block_names=_BLOCK_NAMES),
    "gemma3": Architecture(
        model_type="gemma3_text",
        config=_gemma3_config,
        names=_NAMES,
        block_names=_BLOCK_NAMES
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}
"""The supported architectures, by `general.architecture`."""
