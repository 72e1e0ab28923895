"""Start-up: from settings to a loaded target, a bound speculator, sized pools and a core that is ready to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from specround.contract import (
    BaseSpeculator,
    ConfigError,
    PlanKind,
    SpecCapabilities,
    SpecResources,
    SpecRoundError,
    SpeculatorError,
    parse_speculative_config,
)
from specround.engine.block_pool import BlockPool
from specround.engine.config import EngineConfig
from specround.engine.core import EngineCore
from specround.engine.device_state import DeviceState
from specround.engine.draft_host import EngineDraftHost
from specround.engine.graphs import RoundGraphs
from specround.engine.kv_cache import KVCache, bytes_per_block
from specround.engine.runner import Runner
from specround.engine.scheduler import Scheduler, SchedulerLimits
from specround.kernels.reference import PagedCommitKernel
from specround.kernels.registry import KernelRegistry
from specround.models.attention import KVShape
from specround.models.causal_lm import CausalModel
from specround.models.pretrained import load_pretrained, resolve_dtype
from specround.models.sources import resolve_model
from specround.round import SpecRound, lower_resources

_DEFAULT_CPU_KV_BYTES = 2 << 30
_GPU_MEMORY_SHARE = 0.85

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
    declared = SpecResources(max_candidates=1)
    if speculation is not None:
        with _start_up_hook(speculation, "declare_resources"):
            declared = speculation.declare_resources()
    if isinstance(declared.hidden_states, tuple):
        raise ConfigError(
            "hidden_states", declared.hidden_states, "'none' or 'last': layer outputs are not offered yet"
        )
    device = _resolve_device(config.device)
    source = resolve_model(config.model)
    dtype = resolve_dtype(config.dtype if config.quantization is None else "bfloat16", device)
    loaded = load_pretrained(source, dtype, device, on_progress=on_progress)
    model = CausalModel(loaded, quantization=config.quantization)
    max_model_len = _resolve_max_model_len(config, model)
    registry = KernelRegistry(() if speculation is None else speculation.spec_kernel_providers)
    capabilities = registry.capabilities(model.descriptors)
    effective = declared
    if speculation is not None:
        with _start_up_hook(speculation, "adapt_resources"):
            effective = lower_resources(speculation, declared, capabilities)
    state = DeviceState(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        num_drafts=declared.max_candidates - 1,
        block_size=config.block_size,
        device=device,
    )
    draft_host = None if speculation is None else EngineDraftHost(model, state, declared)
    speculator = None
    if speculation is not None and draft_host is not None:
        with _start_up_hook(speculation, "create"):
            speculator = speculation.create(declared, draft_host, device)
        with _start_up_hook(speculator, "bind_resources"):
            speculator.bind_resources(effective)
    cache, pool = _allocate(config, model, draft_host, max_model_len, registry, device)
    registry.bind(effective)
    runner = _build_runner(config, model, state, cache, registry, speculator, effective, draft_host)
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        lookahead=declared.max_candidates - 1,
        max_candidates=effective.max_candidates,
    )
    late = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    core = EngineCore(Scheduler(limits, pool, speculation), runner, speculation, async_scheduling=late)
    kind = None if speculation is None else effective.kind
    return Engine(core=core, model=model, max_model_len=max_model_len, plan_kind=kind, capabilities=capabilities)


@contextmanager
def _start_up_hook(owner: object, hook: str) -> Iterator[None]:
    """Name the speculator and its hook when it fails; errors that already say what to change pass as they are."""
    try:
        yield
    except SpecRoundError:
        raise
    except Exception as error:
        raise SpeculatorError(type(owner).__name__, hook, (), f"{type(error).__name__}: {error}") from error


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
        return model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"at most {model.max_model_len}, the model's own limit"
        )
    return config.max_model_len


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
    num_blocks = _num_blocks(config, layers, max_model_len, device)
    cache = KVCache(layers, num_blocks, config.block_size, device)
    model.bind(registry, cache.layers[: len(target)])
    if draft_host is not None:
        draft_host.bind(registry, cache.layers[len(target) :])
    return cache, BlockPool(num_blocks)


def _num_blocks(
    config: EngineConfig, layers: list[tuple[KVShape, torch.dtype]], max_model_len: int, device: torch.device
) -> int:
    per_block = bytes_per_block(layers, config.block_size)
    needed = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        field, value, num_blocks = "num_blocks", config.num_blocks, config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        field, value = "kv_cache_memory_bytes", config.kv_cache_memory_bytes
        num_blocks = config.kv_cache_memory_bytes // per_block
    else:
        available = _DEFAULT_CPU_KV_BYTES
        if device.type == "cuda":
            available = int(torch.cuda.mem_get_info(device)[0] * _GPU_MEMORY_SHARE)
        field, value = "max_model_len", max_model_len
        num_blocks = min(available // per_block, needed * config.max_num_seqs)
    if num_blocks < needed:
        allowed = (
            f"enough for one request of max_model_len={max_model_len}: {needed} blocks of {config.block_size} tokens, "
            f"{needed * per_block} bytes (here {num_blocks} blocks); or lower max_model_len"
        )
        raise ConfigError(field, value, allowed)
    return num_blocks


def _build_runner(
    config: EngineConfig,
    model: CausalModel,
    state: DeviceState,
    cache: KVCache,
    registry: KernelRegistry,
    speculator: BaseSpeculator | None,
    effective: SpecResources,
    draft_host: EngineDraftHost | None,
) -> Runner:
    device = state.block_tables.device
    check_values = device.type == "cpu" if config.check_values is None else config.check_values
    commit_kernel: PagedCommitKernel = registry.get("layout:paged_token/commit")  # type: ignore[assignment]
    spec_round = SpecRound(speculator, effective, commit_kernel, model.vocab_size, check_values=check_values)
    return Runner(
        model=model,
        state=state,
        cache=cache,
        spec_round=spec_round,
        draft_host=draft_host,
        host_drafting=effective.drafting == "host" and "propose" in spec_round.hooks,
        wants_hidden=effective.hidden_states == "last",
        graphs=_graphs(config, device, effective, state, speculator, check_values),
        record_rounds=config.record_rounds,
    )


def _graphs(
    config: EngineConfig,
    device: torch.device,
    effective: SpecResources,
    state: DeviceState,
    speculator: BaseSpeculator | None,
    check_values: bool,
) -> RoundGraphs | None:
    if not config.cuda_graphs:
        return None
    if device.type != "cuda":
        raise ConfigError("cuda_graphs", True, "False on a CPU")
    if check_values:
        raise ConfigError("cuda_graphs", True, "False with check_values: reading values cannot be captured")
    if speculator is not None and not speculator.capturable:
        raise ConfigError("cuda_graphs", True, f"False with {type(speculator).__name__}, which is not capturable")
    sizes = sorted({1 << power for power in range(config.max_num_seqs.bit_length())} | {config.max_num_seqs})
    sizes = [size for size in sizes if size <= config.max_num_seqs]
    candidates = sorted({1, *effective.candidate_shapes, effective.max_candidates})
    return RoundGraphs(sizes, candidates, state.max_model_len)
