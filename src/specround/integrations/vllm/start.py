"""What a worker checks and selects before it starts its device, whatever the device."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from specround.contract import ConfigError, parse_speculative_config
from specround.integrations.vllm.limits import check_settings, check_wiring
from specround.integrations.vllm.settings import own_config
from specround.integrations.vllm.versions import check_version

BACKEND = "specround.integrations.vllm.attention.RoundBackend"


def check_start(vllm_config: Any, *, is_v2: bool) -> None:
    """Refuse a version, a setting or a runner that the round is not hosted for.

    Args:
        vllm_config: vLLM's configuration.
        is_v2: The worker runs vLLM's V2 runner.

    Raises:
        ConfigError: Names what does not fit.
    """
    check_version()
    check_settings(vllm_config)
    speculation = parse_speculative_config(own_config(vllm_config.additional_config))
    check_wiring(vllm_config, speculation.num_speculative_tokens)
    if not is_v2:
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", 0, "1: call prepare_environment() before vLLM is imported")


def use_backend(place: AttentionBackendEnum) -> None:
    """Put our attention backend in a place of vLLM's table, in this process."""
    register_backend(place, BACKEND)
