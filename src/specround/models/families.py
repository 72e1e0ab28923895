"""The table of model families: what each Hugging Face model type needs besides the attention hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from specround.contract.errors import ModelError

Windows = Literal["none", "every layer", "layer types"]
"""Which layers of a family have `config.sliding_window`."""

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _plain(config: Any, logits: Tensor) -> Tensor:
    """The language model head's output as it is."""
    return logits


def _softcapped(config: Any, logits: Tensor) -> Tensor:
    """`cap * tanh(logits / cap)`, where the config sets `final_logit_softcapping`."""
    cap: float | None = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


def _multiplied(config: Any, logits: Tensor) -> Tensor:
    """Times `logit_scale`."""
    scale: float = config.logit_scale
    return logits * scale


def _divided(config: Any, logits: Tensor) -> Tensor:
    """Divided by `logits_scaling`."""
    scale: float = config.logits_scaling
    return logits / scale


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type.

    Attributes:
        config_class: Its configuration class in transformers.
        model_class: Its causal language model in transformers.
        windows: Which layers have a sliding window.
        window_in_mask_only: The module does not tell the hook about the window.
        has_sinks: Every layer has attention sinks.
        softcap: Config attribute with the soft cap of the scores, or None.
        final_logits: Config and the head's output to the model's logits.
        experts: How the projections of one expert are called in checkpoints, as (gate, up, down); None = no experts.
        expert_block: Name of the expert block in checkpoints; the module's own is "mlp".
        rope_by_layer_type: The rotary embedding has one set of parameters for each layer type.
        rotary_halves: The rotary embedding gives angles repeated as two halves, in the type of the activations, so that
            ours can stand in.
        refused: Config attributes with the reason why a true value is refused.
        original_code: Values of `auto_map` that name the code this type was first published with, which transformers'
            own class replaces. Any other is refused.
    """

    config_class: str
    model_class: str
    windows: Windows = "none"
    window_in_mask_only: bool = False
    has_sinks: bool = False
    softcap: str | None = None
    final_logits: Callable[[Any, Tensor], Tensor] = _plain
    experts: tuple[str, str, str] | None = None
    expert_block: str = "mlp"
    rope_by_layer_type: bool = False
    rotary_halves: bool = True
    refused: tuple[tuple[str, str], ...] = ()
    original_code: tuple[str, ...] = ()

    def layer_windows(self, config: Any) -> tuple[int | None, ...]:
        """The sliding window of each layer, None = full attention, as transformers' own masks apply it.

        Raises:
            ModelError: Layer types that this family's masks do not have or that contradict it, or no usable window.
        """
        count = int(config.num_hidden_layers)
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        types = [_FULL] * count if named is None else list(named)
        if self.windows == "every layer" and window is not None:
            types = [_SLIDING] * count
        expected = [_FULL] * count if self.windows == "none" else types
        if len(types) != count or set(types) - {_SLIDING, _FULL} or (named is not None and list(named) != expected):
            allowed = (
                f"{count} of {_SLIDING!r} and {_FULL!r}" if self.windows == "layer types" else f"absent or {expected}"
            )
            raise ModelError("layer_types", named, f"{allowed}: others are not computed for {config.model_type!r}")
        if _SLIDING in types and (type(window) is not int or window < 1):
            raise ModelError("sliding_window", window, f"at least 1: layer_types of {config.model_type!r} use it")
        return tuple(window if kind == _SLIDING else None for kind in types)

    def layer_softcap(self, config: Any) -> float | None:
        """Soft cap of the scores, or None."""
        return None if self.softcap is None else getattr(config, self.softcap)

    def check(self, config: Any) -> None:
        """Refuse a configuration this family's hook does not cover.

        Raises:
            ModelError: Names the setting and the reason.
        """
        for name, reason in self.refused:
            if getattr(config, name, None):
                raise ModelError(name, getattr(config, name), f"unset: {reason}")
        self.layer_windows(config)


_BIDIRECTIONAL = (("use_bidirectional_attention", "rows would see tokens after them"),)
_QWEN_EXPERTS = ("gate_proj", "up_proj", "down_proj")

FAMILIES: Final[dict[str, Family]] = {
    "cohere2": Family(
        config_class="Cohere2Config",
        model_class="Cohere2ForCausalLM",
        windows="layer types",
        final_logits=_multiplied,
        rotary_halves=False,
    ),
    "deepseek_v3": Family(
        config_class="DeepseekV3Config",
        model_class="DeepseekV3ForCausalLM",
        experts=_QWEN_EXPERTS,
        original_code=("modeling_deepseek.DeepseekV3ForCausalLM",),
    ),
    "gemma2": Family(
        config_class="Gemma2Config",
        model_class="Gemma2ForCausalLM",
        windows="layer types",
        softcap="attn_logit_softcapping",
        final_logits=_softcapped,
        refused=_BIDIRECTIONAL,
    ),
    "gemma3_text": Family(
        config_class="Gemma3TextConfig",
        model_class="Gemma3ForCausalLM",
        windows="layer types",
        final_logits=_softcapped,
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
    "granite": Family(config_class="GraniteConfig", model_class="GraniteForCausalLM", final_logits=_divided),
    "llama": Family(config_class="LlamaConfig", model_class="LlamaForCausalLM"),
    "mistral": Family(config_class="MistralConfig", model_class="MistralForCausalLM", windows="every layer"),
    "mixtral": Family(
        config_class="MixtralConfig",
        model_class="MixtralForCausalLM",
        windows="every layer",
        experts=("w1", "w3", "w2"),
        expert_block="block_sparse_moe",
    ),
    "olmo2": Family(config_class="Olmo2Config", model_class="Olmo2ForCausalLM", rotary_halves=False),
    "olmo3": Family(
        config_class="Olmo3Config", model_class="Olmo3ForCausalLM", windows="layer types", rope_by_layer_type=True
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
    "smollm3": Family(config_class="SmolLM3Config", model_class="SmolLM3ForCausalLM", windows="layer types"),
}
"""The supported model types."""

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
    "mamba": "a Mamba1 state cannot verify more than one token",
    "falcon_mamba": "a Mamba1 state cannot verify more than one token",
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
