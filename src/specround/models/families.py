"""The table of model families."""

from __future__ import annotations

from typing import Final

from specround.contract.errors import ModelError
from specround.models.family import (
    CONV,
    FULL,
    HYBRID,
    LINEAR,
    Family,
    adapters_in_order,
    divided,
    head_multiplied,
    multiplied,
    softcapped,
)

_BIDIRECTIONAL = (("use_bidirectional_attention", "rows would see tokens after them"),)
_QWEN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_PREDICTION = (r"mtp\.", "layers for multi-token prediction")
_WINDOW_IGNORED = (("sliding_window", "transformers does not apply it to this model type"),)
_MIXED = (LINEAR, FULL)


def _separate_convolutions(block: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Checkpoints that convolve queries, keys and values with a weight each; the module has one."""
    return ((f"{block}.conv1d.weight", tuple(f"{block}.{part}_conv1d.weight" for part in "qkv")),)


FAMILIES: Final[dict[str, Family]] = {
    "bamba": Family(
        config_class="BambaConfig",
        model_class="BambaForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        rotary_halves=False,
    ),
    "cohere2": Family(
        config_class="Cohere2Config",
        model_class="Cohere2ForCausalLM",
        windows="layer types",
        final_logits=multiplied,
        rotary_halves=False,
    ),
    "deepseek_v3": Family(
        config_class="DeepseekV3Config",
        model_class="DeepseekV3ForCausalLM",
        experts=_QWEN_EXPERTS,
        original_code=("modeling_deepseek.DeepseekV3ForCausalLM",),
    ),
    "falcon_h1": Family(
        config_class="FalconH1Config",
        model_class="FalconH1ForCausalLM",
        block_types=(HYBRID,),
        verifies="tree",
        final_logits=head_multiplied,
        rotary_halves=False,
    ),
    "falcon_mamba": Family(
        config_class="FalconMambaConfig",
        model_class="FalconMambaForCausalLM",
        block_types=(LINEAR,),
        verifies="none",
        renamed=((r"\.embedding\.", ".embeddings."),),
        rotary_halves=False,
    ),
    "gemma2": Family(
        config_class="Gemma2Config",
        model_class="Gemma2ForCausalLM",
        windows="layer types",
        softcap="attn_logit_softcapping",
        final_logits=softcapped,
        refused=_BIDIRECTIONAL,
    ),
    "gemma3_text": Family(
        config_class="Gemma3TextConfig",
        model_class="Gemma3ForCausalLM",
        windows="layer types",
        final_logits=softcapped,
        rope_by_layer_type=True,
        refused=(*_BIDIRECTIONAL, ("attn_logit_softcapping", "transformers does not apply it to this model type")),
    ),
    "glm4": Family(config_class="Glm4Config", model_class="Glm4ForCausalLM", rotary_halves=False),
    "gpt_oss": Family(
        config_class="GptOssConfig",
        model_class="GptOssForCausalLM",
        windows="layer types",
        has_sinks=True,
        experts=_QWEN_EXPERTS,
        rotary_halves=False,
    ),
    "granite": Family(config_class="GraniteConfig", model_class="GraniteForCausalLM", final_logits=divided),
    "granitemoehybrid": Family(
        config_class="GraniteMoeHybridConfig",
        model_class="GraniteMoeHybridForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        final_logits=divided,
        module_block="block_sparse_moe",
        expert_block="block_sparse_moe",
        experts=_QWEN_EXPERTS,
        renamed=(
            (r"block_sparse_moe\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
            (r"block_sparse_moe\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
            (r"block_sparse_moe\.router\.layer\.weight$", "block_sparse_moe.router.weight"),
        ),
        rotary_halves=False,
    ),
    "jamba": Family(
        config_class="JambaConfig",
        model_class="JambaForCausalLM",
        block_types=_MIXED,
        verifies="none",
        experts=_QWEN_EXPERTS,
        expert_block="feed_forward",
        module_block="feed_forward",
        rotary_halves=False,
    ),
    "kimi_linear": Family(
        config_class="KimiLinearConfig",
        model_class="KimiLinearForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        experts=("w1", "w3", "w2"),
        expert_block="block_sparse_moe",
        renamed=(
            (r"self_attn\.(f_a_proj|f_b_proj)\.", r"self_attn.forget_gate.\1."),
            (r"self_attn\.(dt_bias|A_log)$", r"self_attn.forget_gate.\1"),
        ),
        merged=_separate_convolutions("self_attn"),
        rotary_halves=False,
        original_code=("modeling_kimi.KimiLinearForCausalLM",),
    ),
    "lfm2": Family(
        config_class="Lfm2Config",
        model_class="Lfm2ForCausalLM",
        block_types=(CONV, FULL),
        verifies="tree",
        rotary_halves=False,
    ),
    "llama": Family(config_class="LlamaConfig", model_class="LlamaForCausalLM"),
    "mamba": Family(
        config_class="MambaConfig",
        model_class="MambaForCausalLM",
        block_types=(LINEAR,),
        verifies="none",
        renamed=((r"\.embedding\.", ".embeddings."),),
        rotary_halves=False,
    ),
    "mamba2": Family(
        config_class="Mamba2Config",
        model_class="Mamba2ForCausalLM",
        block_types=(LINEAR,),
        verifies="tree",
        renamed=((r"\.embedding\.", ".embeddings."),),
        rotary_halves=False,
    ),
    "mistral": Family(config_class="MistralConfig", model_class="MistralForCausalLM", windows="every layer"),
    "mixtral": Family(
        config_class="MixtralConfig",
        model_class="MixtralForCausalLM",
        windows="every layer",
        experts=("w1", "w3", "w2"),
        expert_block="block_sparse_moe",
    ),
    "nemotron_h": Family(
        config_class="NemotronHConfig",
        model_class="NemotronHForCausalLM",
        block_types=(LINEAR, FULL, "mlp", "moe"),
        verifies="tree",
        experts=("", "up_proj", "down_proj"),
        expert_block="mixer",
        module_block="mixer",
        renamed=((r"^backbone\.", "model."),),
        skipped=(_PREDICTION,),
        rotary_halves=False,
        refused=_WINDOW_IGNORED,
        original_code=("modeling_nemotron_h.NemotronHForCausalLM",),
    ),
    "olmo2": Family(config_class="Olmo2Config", model_class="Olmo2ForCausalLM", rotary_halves=False),
    "olmo3": Family(
        config_class="Olmo3Config", model_class="Olmo3ForCausalLM", windows="layer types", rope_by_layer_type=True
    ),
    "olmo_hybrid": Family(
        config_class="OlmoHybridConfig",
        model_class="OlmoHybridForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        renamed=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        ),
        merged=_separate_convolutions("linear_attn"),
        rotary_halves=False,
    ),
    "phi3": Family(
        config_class="Phi3Config",
        model_class="Phi3ForCausalLM",
        windows="every layer",
        original_code=("modeling_phi3.Phi3ForCausalLM",),
    ),
    "qwen2": Family(config_class="Qwen2Config", model_class="Qwen2ForCausalLM", windows="layer types"),
    "qwen2_moe": Family(
        config_class="Qwen2MoeConfig",
        model_class="Qwen2MoeForCausalLM",
        windows="layer types",
        window_in_mask_only=True,
        experts=_QWEN_EXPERTS,
    ),
    "qwen3": Family(config_class="Qwen3Config", model_class="Qwen3ForCausalLM", windows="layer types"),
    "qwen3_moe": Family(
        config_class="Qwen3MoeConfig",
        model_class="Qwen3MoeForCausalLM",
        windows="every layer",
        experts=_QWEN_EXPERTS,
    ),
    "qwen3_next": Family(
        config_class="Qwen3NextConfig",
        model_class="Qwen3NextForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        experts=_QWEN_EXPERTS,
        skipped=(_PREDICTION,),
        rotary_halves=False,
    ),
    "qwen3_5_text": Family(
        config_class="Qwen3_5TextConfig",
        model_class="Qwen3_5ForCausalLM",
        block_types=_MIXED,
        verifies="tree",
        renamed=((r"^model\.language_model\.", "model."),),
        skipped=(_PREDICTION, (r"model\.visual\.", "images are not read")),
        rotary_halves=False,
    ),
    "smollm3": Family(config_class="SmolLM3Config", model_class="SmolLM3ForCausalLM", windows="layer types"),
    "zamba2": Family(
        config_class="Zamba2Config",
        model_class="Zamba2ForCausalLM",
        block_types=(LINEAR, HYBRID),
        verifies="tree",
        check_module=adapters_in_order,
        rotary_halves=False,
    ),
}
"""The supported model types."""

TEXT_PARTS: Final[dict[str, tuple[str, str]]] = {"qwen3_5": ("text_config", "Qwen3_5ForConditionalGeneration")}
"""Types that also read images and whose text part is a type of the table: where the configuration of that part is, and
what the whole model is called. The text part is loaded alone."""

REFUSED: Final[dict[str, str]] = {
    "bloom": "its attention does not go through transformers' attention interface",
    "falcon": "its attention does not go through transformers' attention interface",
    "gpt_neo": "its attention does not go through transformers' attention interface",
    "gptj": "its attention does not go through transformers' attention interface",
    "mpt": "its attention does not go through transformers' attention interface",
    "rwkv": "its attention does not go through transformers' attention interface",
    "xlnet": "its attention does not go through transformers' attention interface",
    "llama4_text": "chunked attention cuts chunks by position, which windows do not express",
    "gemma3": "it reads images; the text model alone has the type 'gemma3_text'",
}
"""Model types that are refused for a reason worth saying; all others that are not in `FAMILIES` are refused too."""


def family_of(model_type: object, source: str) -> Family:
    """The table's entry for a model type.

    Args:
        model_type: From the configuration.
        source: Name of the model, for the message.

    Raises:
        ModelError: Not in the table.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = REFUSED.get(model_type, "") if isinstance(model_type, str) else ""
    wanted = f"one of {sorted(FAMILIES)} (model {source!r})"
    raise ModelError("model_type", model_type, f"{wanted}: {reason}" if reason else wanted)
