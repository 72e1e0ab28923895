"""`run_bench`: load, check, time in turns, look into the steps, and put the figures together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from specround.bench.batches import BatchPrompts, make_batches
from specround.bench.gate import agreement, check_speculator
from specround.bench.hardware import describe_commit, describe_hardware, describe_versions
from specround.bench.prompts import BenchPrompt, load_prompts, pick_prompts
from specround.bench.row_curve import measure_row_curve
from specround.bench.settings import BenchSettings
from specround.bench.step_clock import StepClock, time_split
from specround.bench.summary import summarise
from specround.bench.timing import Progress, measure
from specround.bench.variants import EngineVariant, Run, Variant
from specround.contract import parse_speculative_config
from specround.engine import LLM

_ROW_CURVE = {"method": "specround.bench.row_curve:RowCurveConfig"}
_CACHE_FIELD = "suffix_decoding_max_cached_requests"


def run_bench(settings: BenchSettings, on_progress: Progress | None = None) -> dict[str, Any]:
    """Run a benchmark.

    Args:
        settings: What is measured.
        on_progress: Called while it runs.

    Returns:
        Everything that was found, as JSON values.

    Raises:
        GateError: A speculator does not generate what plain decoding generates; nothing was timed.
        ConfigError: A setting or the prompts cannot be used.
        ModelError: The model cannot be loaded.
    """
    names = settings.speculator_names
    for config in settings.speculators:
        parse_speculative_config(config)
    chosen = pick_prompts(load_prompts(settings.prompts), settings.kinds, settings.per_kind)
    threads = torch.get_num_threads()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        return _run(settings, names, chosen, on_progress or (lambda phase, done, total: None))
    finally:
        torch.set_num_threads(threads)


def _run(
    settings: BenchSettings, names: Sequence[str], chosen: Mapping[str, list[BenchPrompt]], report: Progress
) -> dict[str, Any]:
    ours = _load_ours(settings, names, report)
    plain = ours[0]
    model = plain.llm.engine.model
    device = next(iter(model.named_parameters().values())).device
    batches = make_batches(chosen, model.tokenizer, settings.batch, settings.chat_template)
    variants: list[Variant] = [*ours, *_load_peers(settings, plain, device, report)]
    gate = _gate(variants, ours, batches, report)
    samples = measure(variants, batches, settings.repeats, report)
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    roles = {variant.name: variant.role for variant in variants}
    result: dict[str, Any] = {
        "benchmark": "specround bench",
        "model": settings.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "settings": _shown(settings, names, chosen),
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "commit": describe_commit(),
        "warnings": _warnings(settings, names, recurrent=bool(model.recurrent_layers)),
        "gate": gate,
        "roles": roles,
        "results": summarise([batch.kind for batch in batches], samples, roles),
        "steps": {variant.name: _split(variant, batches, wait, report) for variant in ours},
    }
    if settings.row_curve:
        report("rows", 0, 1)
        curve_llm = LLM(settings.model, _ROW_CURVE, **{**settings.engine, "max_num_seqs": 1})
        result["row_curve"] = measure_row_curve(curve_llm, max(3, settings.repeats), wait)
        report("rows", 1, 1)
    rounded: dict[str, Any] = _rounded(result)
    return rounded


def _gate(
    variants: Sequence[Variant], ours: Sequence[EngineVariant], batches: Sequence[BatchPrompts], report: Progress
) -> dict[str, Any]:
    """Run everything once, which also warms it up, and compare with plain decoding."""
    runs: dict[str, list[Run]] = {}
    total = len(variants) * len(batches)
    plain, checked = ours[0], {variant.name for variant in ours[1:]}
    found: dict[str, Any] = {}
    for number, variant in enumerate(variants):
        runs[variant.name] = []
        for place, batch in enumerate(batches):
            report("checking", number * len(batches) + place, total)
            runs[variant.name].append(variant.run(batch.token_ids))
        if variant.name in checked:
            found[variant.name] = check_speculator(variant.name, plain, batches, runs[plain.name], runs[variant.name])
        elif variant is not plain:
            share = agreement(batches, runs[plain.name], runs[variant.name])
            found[variant.name] = {"equal_share": share, "required": "nothing", "ties": []}
    report("checking", total, total)
    return found


def _split(
    variant: EngineVariant, batches: Sequence[BatchPrompts], wait: Callable[[], None] | None, report: Progress
) -> dict[str, Any]:
    """Run every batch once more with the clock on."""
    wall = tokens = 0.0
    with StepClock(variant.llm.engine.core, wait) as clock:
        for place, batch in enumerate(batches):
            report(f"steps of {variant.name}", place, len(batches))
            started = time.perf_counter()
            tokens += variant.run(batch.token_ids).num_tokens
            wall += time.perf_counter() - started
    report(f"steps of {variant.name}", len(batches), len(batches))
    split = time_split(clock.decode_steps)
    outside = wall - sum(step.total for step in clock.steps)
    return split | {"outside_step_us_per_token": 1e6 * outside / tokens, "outside_step_share": outside / wall}


def _load_ours(settings: BenchSettings, names: Sequence[str], report: Progress) -> list[EngineVariant]:
    loaded = []
    configs: list[tuple[str, Mapping[str, Any] | None]] = [("plain", None)]
    configs += zip(names, settings.speculators, strict=True)
    for name, config in configs:
        llm = LLM(
            settings.model,
            config,
            on_load=_loading(name, report),
            **{**settings.engine, "max_num_seqs": settings.batch},
        )
        loaded.append(EngineVariant(name, llm, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos))
    return loaded


def _loading(name: str, report: Progress) -> Callable[[int, int, str], None]:
    return lambda done, total, what: report(f"loading {name}", done, total)


def _load_peers(settings: BenchSettings, plain: EngineVariant, device: torch.device, report: Progress) -> list[Variant]:
    if not settings.peers:
        return []
    from specround.bench.peers.transformers_generate import TransformersModel, TransformersVariant

    report("loading transformers", 0, 1)
    model = TransformersModel(
        settings.checkpoint,
        settings.model,
        plain.llm.engine.model,
        device=device,
        max_tokens=settings.max_tokens,
        ignore_eos=settings.ignore_eos,
    )
    report("loading transformers", 1, 1)
    peers: list[Variant] = [TransformersVariant(model)]
    if settings.batch == 1 and not plain.llm.engine.model.recurrent_layers:
        peers.append(TransformersVariant(model, settings.lookup_tokens))
    return peers


def _shown(settings: BenchSettings, names: Sequence[str], chosen: Mapping[str, list[BenchPrompt]]) -> dict[str, Any]:
    return {
        "speculators": dict(zip(names, (dict(config) for config in settings.speculators), strict=True)),
        "prompts": {kind: len(prompts) for kind, prompts in chosen.items()},
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
        "batch": settings.batch,
        "chat_template": settings.chat_template,
        "ignore_eos": settings.ignore_eos,
        "peers": settings.peers,
        "lookup_tokens": settings.lookup_tokens,
        "engine": dict(settings.engine),
    }


def _warnings(settings: BenchSettings, names: Sequence[str], *, recurrent: bool) -> list[str]:
    found = [
        f"{name} keeps finished requests ({_CACHE_FIELD}): repeats draft from earlier answers to the same prompt"
        for name, config in zip(names, settings.speculators, strict=True)
        if config.get(_CACHE_FIELD)
    ]
    if settings.batch > 1 and settings.peers:
        found.append("transformers' prompt lookup takes one prompt at a time: left out of this batch")
    elif recurrent and settings.peers:
        found.append("transformers' prompt lookup does not take models with recurrent layers: left out")
    if settings.repeats == 1:
        found.append("one repeat shows no spread: figures of a busy machine may mean nothing")
    cores = os.cpu_count() or 1
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > cores + 1:
        found.append(f"the machine is busy: a load of {os.getloadavg()[0]:.1f} on {cores} cores")
    return found


def _rounded(value: Any) -> Any:
    """The same JSON values with six significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
