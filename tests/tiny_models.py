"""Tiny random checkpoints on disk, as Hugging Face directories and as GGUF files, for the whole test suite."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tiny_recurrent import RECURRENT_CONFIGS, recurrent_config

ROPE_THETA = 10000.0
NORM_EPS = 1e-5
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EXTRA_MERGES = ("t h", "h e", "i n", "e r", "a n", "th e", "o n", "r e", "Ġ the", "Ġ a", "l l", "o r", "in g")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(
    directory: Path,
    *,
    vocab_size: int | None = None,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 256,
    seed: int = 0,
    with_tokenizer: bool = False,
    tie: bool = False,
    eos_token_id: int | list[int] | None = 2,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random Llama as a Hugging Face directory; the same arguments always give the same bytes.

    `vocab_size` defaults to 64, or to 280 with a tokenizer (byte-level BPE needs at least 260).
    The greedy continuations of different prompts differ and do not fall into short loops.
    """
    vocab_size = _vocab_size(vocab_size, with_tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    config = llama_config(vocab_size, hidden, layers, heads, kv_heads, max_position, tie, eos_token_id)
    weights = {name: tensor.to(dtype) for name, tensor in llama_weights(config, seed).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos_token_id})
    if with_tokenizer:
        write_tokenizer(directory, vocab_size)
    return directory


def tiny_model(directory: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of any supported type as transformers itself would save it.

    Where the family has windows they are of a few tokens, smaller than a draft tree. `overrides` replaces entries of
    the configuration. The same arguments give the same weights in every version of transformers.
    """
    import transformers

    from specround.models.families import FAMILIES

    family = FAMILIES[model_type]
    config = getattr(transformers, family.config_class)(**(tiny_config(model_type) | overrides))
    module = getattr(transformers, family.model_class)(config)
    with torch.no_grad():
        stored = module.state_dict()
        for name, tensor in stored.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("sinks"):
                tensor.copy_(noise)
            elif name.endswith(("A_log", "dt_bias")):
                tensor.copy_(noise - 1.0)  # states remember a few tokens up to a few dozen
            elif tensor.ndim == 1:
                centred = model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) and "linear_attn" not in name
                tensor.copy_((0.0 if "bias" in name or centred else 1.0) + 0.1 * noise)
            elif not (config.tie_word_embeddings and name == "lm_head.weight"):
                tensor.copy_((0.2 if model_type == "zamba2" else 0.4) * noise)  # its blocks amplify rounding
    module.generation_config.eos_token_id = None
    module.save_pretrained(directory)
    return directory


def tiny_config(model_type: str) -> dict[str, Any]:
    """Arguments of the configuration class of a tiny model, beside its defaults."""
    if model_type in RECURRENT_CONFIGS:
        return recurrent_config(model_type)
    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    sliding, full = "sliding_attention", "full_attention"
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
        "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
        "mistral": {"sliding_window": 7},
        "phi3": {
            "sliding_window": 7,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": ROPE_THETA} | factors,
        },
        "gemma2": {
            "sliding_window": 5,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
        "gemma3_text": {
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": [sliding, full],
            "final_logit_softcapping": 10.0,
        },
        "olmo2": {},
        "olmo3": {"sliding_window": 6, "layer_types": [sliding, full]},
        "granite": {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.8,
            "logits_scaling": 2.0,
        },
        "smollm3": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layer_interval": 2,
            "num_hidden_layers": 3,
        },
        "cohere2": {"sliding_window": 6, "layer_types": [sliding, full], "logit_scale": 2.0},
        "glm4": {"eos_token_id": [63]},
        "gpt_oss": {
            "sliding_window": 5,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": ROPE_THETA,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        "mixtral": {"sliding_window": 8, "num_local_experts": 6},
        "qwen3_moe": experts | {"use_sliding_window": True, "sliding_window": 6},
        "qwen2_moe": experts
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "shared_expert_intermediate_size": 24,
        },
        "deepseek_v3": experts
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        },
    }
    config = base | own[model_type]
    if model_type == "deepseek_v3":
        del config["head_dim"], config["num_experts"]
    return config


def tiny_gguf(
    path: Path,
    *,
    vocab_size: int = 280,
    hidden: int = 32,
    layers: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 256,
    seed: int = 0,
    tie: bool = True,
    quant: str = "Q8_0",
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    overrides: Mapping[str, int | float | str] | None = None,
) -> Path:
    """Write a random Llama with a byte-level tokenizer as one GGUF file.

    `quant` names a gguf quantisation with 32-wide blocks ("Q8_0", "Q4_1") or "F32", "F16"; norms stay float32.
    `overrides` adds or replaces integer, float and string metadata by its full key.
    """
    import gguf
    import numpy as np

    config = llama_config(vocab_size, hidden, layers, heads, kv_heads, max_position, tie, 2)
    writer = gguf.GGUFWriter(path, architecture)
    metadata: dict[str, int | float | str] = {
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": max_position,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": 2 * hidden,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": NORM_EPS,
        f"{architecture}.rope.freq_base": ROPE_THETA,
        f"{architecture}.rope.dimension_count": hidden // heads,
        f"{architecture}.vocab_size": vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | dict(overrides or {})
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    tokens, merges = byte_level_vocabulary(vocab_size)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_array("tokenizer.ggml.merges", merges)
    for name, tensor in llama_weights(config, seed).items():
        array = _to_gguf_rows(name, tensor, heads, kv_heads).numpy()
        kind = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else gguf.GGMLQuantizationType[quant]
        writer.add_tensor(_gguf_name(name), gguf.quantize(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_config(
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    max_position: int,
    tie: bool,
    eos_token_id: int | list[int] | None,
) -> dict[str, object]:
    """`config.json` of a tiny Llama, as a dictionary."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": eos_token_id,
    }


def llama_weights(config: Mapping[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights by Hugging Face name; large enough that attention and the logits are far from uniform."""
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    q_rows = sizes["num_attention_heads"] * sizes["head_dim"]
    kv_rows = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(shape, generator) for name, shape in shapes.items()}


def byte_level_vocabulary(vocab_size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: special tokens, the 256 bytes, merges, then unused fillers."""
    from tokenizers.pre_tokenizers import ByteLevel

    if vocab_size < len(SPECIAL_TOKENS) + 256:
        raise ValueError(f"vocab_size={vocab_size}: a byte-level tokenizer needs at least {len(SPECIAL_TOKENS) + 256}")
    base = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    merges = list(EXTRA_MERGES[: vocab_size - len(base)])
    tokens = base + [merge.replace(" ", "") for merge in merges]
    return tokens + [f"<filler {index}>" for index in range(len(tokens), vocab_size)], merges


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with a chat template) for `byte_level_vocabulary`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = byte_level_vocabulary(vocab_size)
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _vocab_size(vocab_size: int | None, with_tokenizer: bool) -> int:
    if vocab_size is not None:
        return vocab_size
    return 280 if with_tokenizer else 64


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return 1.0 + 0.1 * torch.randn(shape, generator=generator)
    return 0.4 * torch.randn(shape, generator=generator)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def _to_gguf_rows(name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Interleave the rotary halves of the query and key rows, as GGUF files of this architecture store them."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    groups = heads if "q_proj" in name else kv_heads
    half = tensor.shape[0] // groups // 2
    return tensor.reshape(groups, 2, half, -1).transpose(1, 2).reshape(tensor.shape).contiguous()
