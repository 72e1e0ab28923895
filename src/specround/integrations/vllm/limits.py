"""What vLLM's settings allow a speculator, decided from the configuration alone; needs no vLLM.

A setting is refused when nothing of the round was tried with it. Every message names the field, its value and what is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specround.contract import ConfigError, SpecLimit
from specround.integrations.vllm.settings import CPU_WORKER, GPU_WORKER, SCHEDULER

_MISSING: Final = object()


@dataclass(frozen=True)
class Rule:
    """One setting.

    Attributes:
        field: Dotted path below vLLM's configuration.
        accepts: Whether a value is fine.
        allowed: What is allowed and why, as a phrase after "must be".
    """

    field: str
    accepts: Callable[[object], bool]
    allowed: str


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


def _unset(value: object) -> bool:
    return value is None or value is False or value == []


REFUSALS: Final = (
    Rule("speculative_config.method", _is("ngram"), "'ngram', the carrier that llm_kwargs fills in"),
    Rule("model_config.runner_type", _is("generate"), "'generate'"),
    Rule("model_config.is_encoder_decoder", _unset, "False: cross-attention layers have no tree mask"),
    Rule("model_config.is_multimodal_model", _unset, "False: positions of images are not laid out"),
    Rule("model_config.is_attention_free", _unset, "False: recurrent states are not hosted in vLLM yet"),
    Rule("model_config.is_hybrid", _unset, "False: recurrent states are not hosted in vLLM yet"),
    Rule("model_config.use_mla", _unset, "False: the attention backend here has no latent cache"),
    Rule("model_config.enforce_eager", _is(True), "True: graphs and compiled forwards were not tried"),
    Rule("model_config.logits_processors", _unset, "unset: processors of others do not know the path of a row"),
    Rule("model_config.return_sampling_mask", _unset, "False: masks are not brought into the order of the path"),
    Rule("model_config.enable_trace_replay", _unset, "False: replayed tokens would not be the round's"),
    Rule("model_config.enable_prompt_embeds", _unset, "False: a speculator is given tokens"),
    Rule("watermark_config", _unset, "unset: watermarks change the draws"),
    Rule("aux_output_config.enabled", _unset, "False: experts are recorded by row, and rows of a plan are no text"),
    Rule("kernel_config.enable_jit_warmup", _unset, "False: the speculator would see requests that nobody sent"),
    Rule("diffusion_config", _unset, "unset: a round commits tokens in order"),
    Rule("parallel_config.pipeline_parallel_size", _is(1), "1: plans do not reach other pipeline stages"),
    Rule("parallel_config.tensor_parallel_size", _is(1), "1: ranks are not told the same plan"),
    Rule("parallel_config.data_parallel_size", _is(1), "1: ranks do not agree on skipping drafts"),
    Rule("parallel_config.decode_context_parallel_size", _is(1), "1: a tree mask spans the whole context"),
    Rule("parallel_config.prefill_context_parallel_size", _is(1), "1: a tree mask spans the whole context"),
    Rule("parallel_config.enable_dbo", _unset, "False: micro-batches split a plan"),
    Rule("parallel_config.ubatch_size", _is(0, 1, None), "0: micro-batches split a plan"),
    Rule("parallel_config.enable_batch_sharded_sampling", _unset, "False: acceptance takes a whole step"),
    Rule("lora_config", _unset, "unset: adapters were not tried with plan rows"),
    Rule("kv_transfer_config", _unset, "unset: a KV connector would send slots before they are committed"),
    Rule("ec_transfer_config", _unset, "unset: encoder caches are not hosted"),
    Rule("scheduler_config.async_scheduling", _unset, "False: results are taken in at once"),
    Rule(
        "cache_config.cache_dtype",
        _is("auto", "float32", "bfloat16", "float16"),
        "'auto': KV quantised with separate scales has no commit kernel that moves the scales",
    ),
    Rule("cache_config.kv_sharing_fast_prefill", _unset, "False: rows of a plan would be skipped"),
    Rule("speculative_config.enable_adaptive_verification", _unset, "False: the speculator trims plans"),
    Rule("device_config.device_type", _is("cpu", "cuda"), "'cpu' or 'cuda': nothing was tried elsewhere"),
)
"""Settings that are refused, in the order they are checked."""


def check_settings(config: object) -> None:
    """Refuse what the round is not hosted for.

    Args:
        config: vLLM's configuration, or anything with the same attributes.

    Raises:
        ConfigError: Names the field, the value and what is allowed.
    """
    for rule in REFUSALS:
        value = _read(config, rule.field)
        if value is _MISSING:
            raise ConfigError(rule.field, None, "known to this version of vLLM: its value cannot be checked")
        if not rule.accepts(value):
            raise ConfigError(rule.field, value, rule.allowed)


def check_wiring(config: object, num_drafts: int) -> None:
    """Refuse a vLLM in which something took the place of what was filled in, such as a flag given once more.

    Args:
        config: vLLM's configuration, or anything with the same attributes.
        num_drafts: K of the speculator.

    Raises:
        ConfigError: Names the field, the value and what is allowed.
    """
    expected: dict[str, tuple[object, ...]] = {
        "parallel_config.worker_cls": (CPU_WORKER, GPU_WORKER),
        "scheduler_config.scheduler_cls": (SCHEDULER,),
        "speculative_config.num_speculative_tokens": (num_drafts,),
    }
    for field, allowed in expected.items():
        value = _read(config, field)
        if isinstance(value, type):
            value = f"{value.__module__}.{value.__qualname__}"
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ConfigError(field, value, f"{names}, which llm_kwargs and specround vllm serve fill in")


def layer_features(layer: object) -> tuple[frozenset[str], int | None, float | None, bool]:
    """What lowers an attention layer: its features, window, soft cap and sinks, read from vLLM's `impl` of the layer.

    Args:
        layer: The attention implementation, or anything with the same attributes.
    """
    features = set()
    if getattr(layer, "alibi_slopes", None) is not None:
        features.add("alibi")
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        features.add("kv_sharing")
    if getattr(layer, "attn_chunk_size", None) is not None:
        features.add("chunked_local")
    window = getattr(layer, "round_window", None)
    softcap = getattr(layer, "logits_soft_cap", None)
    has_sinks = getattr(layer, "sinks", None) is not None
    return frozenset(features), window, softcap or None, has_sinks


def sampling_limit(sampling_params: object) -> SpecLimit:
    """What one request's sampling parameters allow: a chain of nothing but the root, where rows would need a history.

    Args:
        sampling_params: vLLM's `SamplingParams`, or anything with the same attributes.
    """
    found = [
        name for name, neutral in _HISTORY.items() if getattr(sampling_params, name, neutral) not in (neutral, None)
    ]
    found += [name for name in _LISTS if getattr(sampling_params, name, None)]
    found += [name for name in _OPTIONAL if getattr(sampling_params, name, None) is not None]
    if not found:
        return SpecLimit("mask")
    return SpecLimit("none", f"{', '.join(found)}: rows of a tree would need the history of their own path")


_HISTORY: Final = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
_LISTS: Final = ("bad_words", "logits_processors")
_OPTIONAL: Final = ("structured_outputs", "logprobs", "logprob_token_ids", "thinking_token_budget")


def _read(config: object, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name, _MISSING)
        if value is _MISSING:
            return _MISSING
    return value
