"""Start-up inside vLLM's worker: from the speculator's config and the target's layers to `RoundSteps`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from specround.contract import (
    LayerDescriptor,
    SpeculatorConfig,
)
from specround.integrations.vllm.draft_host import VllmDraftHost
from specround.integrations.vllm.draft_layers import DraftLayers
from specround.integrations.vllm.limits import layer_features
from specround.integrations.vllm.requests import RequestTable
from specround.integrations.vllm.step import RoundSteps
from specround.kernels.reference import PagedCommitKernel
from specround.kernels.registry import KernelRegistry
from specround.round import SpecRound, create_speculator, declared_resources, effective_resources

logger = logging.getLogger(__name__)


def build_steps(speculation: SpeculatorConfig, runner: Any) -> RoundSteps:
    """Build the round.

    Args:
        speculation: The speculator's config.
        runner: vLLM's runner with the target loaded.

    Raises:
        ConfigError: The speculator needs what is not hosted.
        CapabilityError: The target verifies nothing.
        SpeculatorError: A hook of the speculator failed.
    """
    device: torch.device = runner.device
    registry = KernelRegistry(speculation.spec_kernel_providers, device_type=device.type)
    declared = declared_resources(speculation)
    descriptors = [describe_layer(name, layer) for name, layer in _attention(runner).items()]
    capabilities = registry.capabilities(descriptors)
    effective = effective_resources(speculation, declared, capabilities)
    table = RequestTable(
        max_num_seqs=runner.max_num_reqs,
        max_model_len=runner.max_model_len,
        num_drafts=declared.max_candidates - 1,
        device=device,
    )
    host = VllmDraftHost(runner, table, DraftLayers(declared.draft_layers, runner.vllm_config, registry))
    speculator = create_speculator(speculation, declared, effective, host, device)
    registry.bind(effective)
    for name, layer in _attention(runner).items():
        descriptor = describe_layer(name, layer)
        layer.kernel, layer.write_kv = registry.get(descriptor.verify_key, descriptor), registry.write_kv
    commit: PagedCommitKernel = registry.get("layout:paged_token/commit")  # type: ignore[assignment]
    spec_round = SpecRound(speculator, effective, commit, runner.vocab_size, check_values=device.type == "cpu")
    logger.info("%s verifies a %s of %d rows", speculation.method, effective.kind, effective.max_candidates)
    return RoundSteps(
        spec_round,
        table,
        wants_hidden=effective.hidden_states == "last",
        host_drafting=effective.drafting == "host" and "propose" in spec_round.hooks,
    )


def _attention(runner: Any) -> dict[str, Any]:
    """Attention implementations by the names of their layers, of the target and of drafters that are loaded."""
    layers = runner.compilation_config.static_forward_context
    return {name: layer.impl for name, layer in layers.items() if hasattr(layer, "impl")}


def describe_layer(name: str, layer: Any) -> LayerDescriptor:
    """What the kernels need to know about one of vLLM's attention layers.

    Args:
        name: Its name in vLLM.
        layer: Its attention implementation.
    """
    features, window, softcap, has_sinks = layer_features(layer)
    return LayerDescriptor(
        name=name,
        verify_key="attention:full/verify" if window is None else "attention:sliding/verify",
        window=window,
        has_sinks=has_sinks,
        softcap=softcap,
        features=features,
    )
