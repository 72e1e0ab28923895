"""GGUF files of the tiny qwen2 and gemma3 models, written as the public converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from family_reference import FamilyReference

from tiny_models import byte_level_vocabulary

SPACE = "\u2581"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "input_layernorm": "attn_norm",
}
_AFTER_ATTENTION = {"qwen2": "ffn_norm", "gemma3": "post_attention_norm"}


def write_gguf(
    path: Path, architecture: str, reference: FamilyReference, overrides: dict[str, Any] | None = None
) -> Path:
    """Write a reference's weights as one float32 GGUF file; `overrides` replaces metadata, None drops it."""
    config = reference.module.config
    prefix = f"{architecture}."
    metadata: dict[str, Any] = {
        prefix + "block_count": config.num_hidden_layers,
        prefix + "context_length": config.max_position_embeddings,
        prefix + "embedding_length": config.hidden_size,
        prefix + "feed_forward_length": config.intermediate_size,
        prefix + "attention.head_count": config.num_attention_heads,
        prefix + "attention.head_count_kv": config.num_key_value_heads,
        prefix + "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    tokens, metadata["tokenizer.ggml.eos_token_id"] = byte_level_vocabulary(config.vocab_size)[0], 2
    if architecture == "gemma3":
        metadata |= {
            prefix + "attention.key_length": config.head_dim,
            prefix + "attention.value_length": config.head_dim,
            prefix + "attention.sliding_window": config.sliding_window,
            prefix + "rope.freq_base": float(config.rope_parameters["full_attention"]["rope_theta"]),
        } | spm_metadata(config.vocab_size)
    else:
        metadata |= {
            prefix + "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(tokens) - 4),
            "tokenizer.ggml.merges": byte_level_vocabulary(config.vocab_size)[1],
        }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata | (overrides or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            kinds = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            kinds[type(value)](key, value)
    for name, tensor in reference.module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        offset = 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
        writer.add_tensor(gguf_name(architecture, name), (tensor.to(torch.float32) + offset).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(architecture: str, name: str) -> str:
    """A tensor's name in the file."""
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("post_attention_layernorm", _AFTER_ATTENTION[architecture])


def spm_metadata(vocab_size: int) -> dict[str, Any]:
    """A SentencePiece vocabulary: special tokens, runs of spaces, the bytes, letters and words with falling scores."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>"]
    runs = ["  ", "   ", "\n\n"]
    rest = [f"<0x{value:02X}>" for value in range(256)]
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz.,'0123456789é", "\n"]
    words = [SPACE + "t", "he", SPACE + "the", "in", "ing", SPACE + "a", "an", "and", SPACE + "and", "er", "on"]
    words += ["ll", "wor", "or", SPACE + "w", SPACE + "wor", "ld", SPACE + "world", "th", "the", "re", "11"]
    tokens = [*special, *runs, *rest, *words, *letters]
    fillers = [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    kinds = [3, 3, 3, 2, 3] + [4] * len(runs) + [6] * len(rest)
    kinds += [1] * (len(words) + len(letters)) + [5] * len(fillers)
    scores = [0.0] * (len(special) + len(runs) + len(rest)) + [-float(i) for i in range(len(words) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *fillers],
        "tokenizer.ggml.scores": scores + [-1000.0] * len(fillers),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
