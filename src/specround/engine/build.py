"""Start-up: from settings to a loaded target, a bound speculator, sized pools and a core that is ready to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specround.contract import (
    BaseSpeculator,
    ConfigError,
    PlanKind,
    SpecCapabilities,
    SpecResources,
    SpeculatorConfig,
    parse_speculative_config,
)
from specround.engine.block_pool import BlockPool
from specround.engine.config import MAX_NUM_DRAFTS, MAX_SETTING, EngineConfig
from specround.engine.core import EngineCore
from specround.engine.device_state import DeviceState
from specround.engine.draft_host import EngineDraftHost
from specround.engine.graphs import RoundGraphs
from specround.engine.kv_cache import KVCache, bytes_per_block
from specround.engine.memory import allocation, free_memory
from specround.engine.runner import Runner
from specround.engine.scheduler import Scheduler, SchedulerLimits
from specround.engine.state_cache import StateCache, build_states
from specround.kernels.reference import PagedCommitKernel
from specround.kernels.reference_states import StateCommitKernel
from specround.kernels.registry import KernelRegistry
from specround.models.attention import KVShape
from specround.models.causal_lm import CausalModel
from specround.models.families import family_of
from specround.models.pretrained import load_pretrained, resolve_dtype
from specround.models.sources import resolve_model
from specround.round import SpecRound, create_speculator, declared_resources, effective_resources

_DEFAULT_CPU_KV_BYTES = 2 << 30
_MEMORY_SHARE = 0.85

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """A ready engine.

    Attributes:
        core: The loop.
        model: The target.
        max_model_len: Longest request.
        plan_kind: Highest plan kind the effective resources allow, None without speculation.
        capabilities: What the target verifies.
    """

    core: EngineCore
    model: CausalModel
    max_model_len: int
    plan_kind: PlanKind | None
    capabilities: SpecCapabilities


def build_engine(config: EngineConfig, on_progress: Progress | None = None) -> Engine:
    """Load the model and start an engine.

    Args:
        config: The settings.
        on_progress: Called with (done, total, name) while weights load.

    Raises:
        ConfigError: Settings that do not fit the model, the device or the memory.
        ModelError: The model cannot be loaded.
        CapabilityError: The model cannot verify anything.
        SpeculatorError: A hook of the speculator failed while it started.
    """
    speculation = None if config.speculative_config is None else parse_speculative_config(config.speculative_config)
    declared = _declare(speculation)
    device = _resolve_device(config.device)
    dtype = resolve_dtype("bfloat16" if config.quantization in ("int8", "int4") else config.dtype, device)
    source = resolve_model(config.model)
    loaded = load_pretrained(source, dtype, device, on_progress=on_progress)
    model = CausalModel(loaded, quantization=config.quantization, state_mode=config.state_mode)
    max_model_len = _resolve_max_model_len(config, model)
    providers = () if speculation is None else speculation.spec_kernel_providers
    registry = KernelRegistry(providers, device_type=device.type)
    capabilities = registry.capabilities(model.descriptors, model.limits)
    effective = declared if speculation is None else effective_resources(speculation, declared, capabilities)
    state = _device_state(config, max_model_len, declared, device)
    draft_host = None if speculation is None else EngineDraftHost(model, state, declared)
    speculator = None
    if speculation is not None and draft_host is not None:
        speculator = create_speculator(speculation, declared, effective, draft_host, device)
    states, state_pool = build_states(config, model, registry, declared.max_candidates - 1, device)
    cache, pool = _allocate(config, model, draft_host, max_model_len, registry, device)
    registry.bind(effective)
    runner = _build_runner(config, model, state, cache, registry, speculator, effective, draft_host, states)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        lookahead=declared.max_candidates - 1,
        max_candidates=effective.max_candidates,
    )
    late = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    core = EngineCore(Scheduler(limits, pool, speculation, state_pool), runner, speculation, async_scheduling=late)
    kind = None if speculation is None else effective.kind
    return Engine(core=core, model=model, max_model_len=max_model_len, plan_kind=kind, capabilities=capabilities)


def load_module(model: str, dtype: torch.dtype) -> Any:
    """A model's own Hugging Face module on the CPU, to compare with: nothing of it is replaced or packed.

    Args:
        model: As in `EngineConfig`.
        dtype: Type of the weights.

    Raises:
        ModelError: The model cannot be loaded.
    """
    return load_pretrained(resolve_model(model), dtype, torch.device("cpu")).module


def _declare(speculation: SpeculatorConfig | None) -> SpecResources:
    """What the speculator declares, within what the engine offers; without one, plain decoding."""
    if speculation is None:
        return SpecResources(max_candidates=1)
    if speculation.num_speculative_tokens > MAX_NUM_DRAFTS:
        raise ConfigError("num_speculative_tokens", speculation.num_speculative_tokens, f"at most {MAX_NUM_DRAFTS}")
    declared = declared_resources(speculation)
    if declared.max_candidates > MAX_NUM_DRAFTS + 1:
        raise ConfigError("max_candidates", declared.max_candidates, f"at most {MAX_NUM_DRAFTS + 1}")
    return declared


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError("device", name, "'auto', 'cpu' or 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "'cpu' on this machine: torch sees no CUDA device")
    return torch.device(name)


def _resolve_max_model_len(config: EngineConfig, model: CausalModel) -> int:
    if config.max_model_len is None:
        return _original_length(model)
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"at most {model.max_model_len}, the model's own limit"
        )
    return config.max_model_len


def _original_length(model: CausalModel) -> int:
    """The model's limit; with LongRoPE the length up to which all rows share one rotation."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return model.max_model_len
    return min(model.max_model_len, int(rope["original_max_position_embeddings"]))


def _device_state(
    config: EngineConfig, max_model_len: int, declared: SpecResources, device: torch.device
) -> DeviceState:
    num_drafts = declared.max_candidates - 1
    row = 8 * (max_model_len + 2 + -(-(max_model_len + 1) // config.block_size) + num_drafts)
    size = (config.max_num_seqs + 1) * row
    what = f"the state of {config.max_num_seqs} requests of {max_model_len} tokens"
    with allocation("max_num_seqs", config.max_num_seqs, size, what, device):
        return DeviceState(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            block_size=config.block_size,
            device=device,
        )


def _allocate(
    config: EngineConfig,
    model: CausalModel,
    draft_host: EngineDraftHost | None,
    max_model_len: int,
    registry: KernelRegistry,
    device: torch.device,
) -> tuple[KVCache, BlockPool]:
    """Size the pool, allocate it, and give every layer its cache and kernel."""
    target = [(shape, model.dtype) for shape in model.kv_shapes]
    layers = target + ([] if draft_host is None else draft_host.kv_layers())
    num_blocks, field = _num_blocks(config, layers, max_model_len, device)
    size = (num_blocks + 1) * bytes_per_block(layers, config.block_size)
    value = max_model_len if field == "max_model_len" else getattr(config, field)
    what = f"a KV pool of {num_blocks} blocks of {config.block_size} tokens"
    with allocation(field, value, size, what, device):
        cache, pool = KVCache(layers, num_blocks, config.block_size, device), BlockPool(num_blocks)
    model.bind(registry, cache.layers[: len(target)])
    if draft_host is not None:
        draft_host.bind(registry, cache.layers[len(target) :])
    return cache, pool


def _num_blocks(
    config: EngineConfig, layers: list[tuple[KVShape, torch.dtype]], max_model_len: int, device: torch.device
) -> tuple[int, str]:
    """Usable blocks, and the setting that decided it."""
    per_block = max(1, bytes_per_block(layers, config.block_size))  # 0 without attention layers
    needed = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        field, value, num_blocks = "num_blocks", config.num_blocks, config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        field, value = "kv_cache_memory_bytes", config.kv_cache_memory_bytes
        num_blocks = config.kv_cache_memory_bytes // per_block
        if not layers:
            num_blocks = min(num_blocks, MAX_SETTING["num_blocks"])
        if num_blocks > MAX_SETTING["num_blocks"]:
            most = MAX_SETTING["num_blocks"]
            raise ConfigError(field, value, f"at most {most * per_block}: {most} blocks of {config.block_size} tokens")
    else:
        free = free_memory(device)
        available = _DEFAULT_CPU_KV_BYTES if free is None else int(free * _MEMORY_SHARE)
        if device.type == "cpu":
            available = min(available, _DEFAULT_CPU_KV_BYTES)
        field, value = "max_model_len", max_model_len
        num_blocks = min(available // per_block, needed * config.max_num_seqs, MAX_SETTING["num_blocks"])
    if num_blocks < needed:
        allowed = (
            f"enough for one request of max_model_len={max_model_len}: {needed} blocks of {config.block_size} tokens, "
            f"{needed * per_block} bytes (here {num_blocks} blocks); or lower max_model_len"
        )
        raise ConfigError(field, value, allowed)
    return num_blocks, field


def _build_runner(
    config: EngineConfig,
    model: CausalModel,
    state: DeviceState,
    cache: KVCache,
    registry: KernelRegistry,
    speculator: BaseSpeculator | None,
    effective: SpecResources,
    draft_host: EngineDraftHost | None,
    states: StateCache | None,
) -> Runner:
    device = state.block_tables.device
    check_values = device.type == "cpu" if config.check_values is None else config.check_values
    models = (model, *(() if draft_host is None else draft_host.models))
    commit_kernel: PagedCommitKernel = registry.get("layout:paged_token/commit")  # type: ignore[assignment]
    state_commit: StateCommitKernel | None = None
    if states is not None:
        key = f"layout:mamba_state@{config.state_mode}/commit"
        state_commit = registry.get(key, states.layers[0].descriptor(config.state_mode))  # type: ignore[assignment]
    spec_round = SpecRound(
        speculator, effective, commit_kernel, model.vocab_size, check_values=check_values, state_commit=state_commit
    )
    return Runner(
        model=model,
        state=state,
        cache=cache,
        spec_round=spec_round,
        states=states,
        draft_host=draft_host,
        host_drafting=effective.drafting == "host" and "propose" in spec_round.hooks,
        wants_hidden=effective.hidden_states == "last",
        graphs=_graphs(config, models, effective, state, speculator, check_values),
        record_rounds=config.record_rounds,
    )


def _graphs(
    config: EngineConfig,
    models: Sequence[CausalModel],
    effective: SpecResources,
    state: DeviceState,
    speculator: BaseSpeculator | None,
    check_values: bool,
) -> RoundGraphs | None:
    if not config.cuda_graphs:
        return None
    if state.block_tables.device.type != "cuda":
        raise ConfigError("cuda_graphs", True, "False on a CPU")
    if check_values:
        raise ConfigError("cuda_graphs", True, "False with check_values: reading values cannot be captured")
    if speculator is not None and not speculator.capturable:
        raise ConfigError("cuda_graphs", True, f"False with {type(speculator).__name__}, which is not capturable")
    for model in models:
        if family_of(model.config.model_type, model.name).experts is not None and model.dtype != torch.bfloat16:
            dtype = str(model.dtype).removeprefix("torch.")
            allowed = (
                f"False with the experts of model type {model.config.model_type!r} in {dtype}: torch's grouped matrix "
                "products wait for the device, except in bfloat16"
            )
            raise ConfigError("cuda_graphs", True, allowed)
    sizes = sorted({1 << power for power in range(config.max_num_seqs.bit_length())} | {config.max_num_seqs})
    sizes = [size for size in sizes if size <= config.max_num_seqs]
    candidates = sorted({1, *effective.candidate_shapes, effective.max_candidates})
    return RoundGraphs(sizes, candidates, state.max_model_len)
