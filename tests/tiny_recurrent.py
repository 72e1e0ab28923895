"""Configurations of tiny models with recurrent blocks: several groups of B and C, limits that bite, odd sizes."""

from __future__ import annotations

from typing import Any

_LINEAR, _FULL = "linear_attention", "full_attention"
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [_LINEAR, _FULL, _LINEAR],
    "num_hidden_layers": 3,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_MAMBA1 = {"state_size": 8, "time_step_rank": 4}

RECURRENT_CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2
    | {
        "mamba_n_heads": 6,
        "mamba_d_ssm": 48,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "mlp_multipliers": [1.1, 0.9],
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 1.5,
    },
    "falcon_mamba": _MAMBA1,
    "granitemoehybrid": _MAMBA2
    | {
        "layer_types": [_LINEAR, _FULL, _LINEAR],
        "num_hidden_layers": 3,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "position_embedding_type": "rope",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.0,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": _EXPERTS
    | {
        "layer_types": [_LINEAR, _FULL, _LINEAR],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_local_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "lfm2": {
        "layer_types": ["conv", _FULL, "conv"],
        "num_hidden_layers": 3,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba": _MAMBA1,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": _EXPERTS
    | {
        "layers_block_type": [_LINEAR, _FULL, "mlp", "moe", _LINEAR],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "time_step_min": 0.3,
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "qwen3_next": _EXPERTS
    | _DELTA_NET
    | {
        "head_dim": 16,
        "num_experts": 6,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "zamba2": {
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
        "num_hidden_layers": 4,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "time_step_min": 0.3,
        "num_key_value_heads": 4,
    },
}
"""What differs from the common sizes and from the defaults, by model type."""

_WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2")


def recurrent_config(model_type: str) -> dict[str, Any]:
    """Arguments of the configuration class of a tiny model, beside its defaults."""
    base: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    if model_type not in _WITHOUT_ATTENTION:
        base |= {
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
    config = base | RECURRENT_CONFIGS[model_type]
    if model_type == "nemotron_h":
        del config["num_hidden_layers"]
    return config
