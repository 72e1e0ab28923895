"""A loaded model's layers: what each verifies, with which kernels, and its memory per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import torch
from rich.table import Table

from specround.contract import PLAN_KINDS, LayerDescriptor, SpecLimit, parse_speculative_config
from specround.kernels.registry import KernelRegistry
from specround.models.attention import KVShape
from specround.models.causal_lm import CausalModel
from specround.models.pretrained import load_pretrained, resolve_dtype
from specround.models.recurrent.layer import RecurrentLayer, bytes_per_state
from specround.models.sources import resolve_model


def describe_model(
    name: str,
    dtype: str = "auto",
    speculative_config: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Load a model on the CPU and describe its layers, as JSON values.

    Args:
        name: Alias, directory, `.gguf` file or hub id.
        dtype: Type of the weights; "auto" is the default of a CPU.
        speculative_config: A speculator whose kernel providers overlay the built-in kernels.
        on_progress: Called with (done, total, name) while weights load.

    Raises:
        ModelError: The model cannot be loaded.
        ConfigError: The dtype or the speculator is unknown.
    """
    config = None if speculative_config is None else parse_speculative_config(speculative_config)
    device = torch.device("cpu")
    weights = resolve_dtype(dtype, device)
    model = CausalModel(load_pretrained(resolve_model(name), weights, device, on_progress=on_progress))
    registry = KernelRegistry(() if config is None else config.spec_kernel_providers, device_type=device.type)
    layers = [
        _attention_layer(descriptor, shape, model.dtype, registry)
        for descriptor, shape in zip(model.attention_descriptors, model.kv_shapes, strict=True)
    ]
    layers += [_recurrent_layer(layer, model, registry) for layer in model.recurrent_layers]
    capabilities = registry.capabilities(model.descriptors, model.limits)
    return {
        "model": name,
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "kind": capabilities.kind,
        "reasons": list(capabilities.reasons),
        "bytes_per_token": sum(layer["bytes_per_token"] for layer in layers),
        "bytes_per_request": sum(layer["bytes_per_request"] for layer in layers),
        "layers": layers,
    }


def layer_table(model: Mapping[str, Any]) -> Table:
    """The layers as a table; neighbours that differ by their name only share a row.

    Args:
        model: What `describe_model` returned.
    """
    table = Table()
    for heading in ("layers", "verifies", "kernel", "provider", "sees", "heads x dims"):
        table.add_column(heading)
    table.add_column("bytes per token", justify="right")
    table.add_column("bytes per request", justify="right")
    table.add_column("reason")
    for _, group in groupby(model["layers"], key=lambda layer: {**layer, "name": ""}):
        members = list(group)
        first, last = members[0], members[-1]
        names = first["name"] if first is last else f"{first['name']} to {last['name']}"
        table.add_row(
            names,
            first["kind"],
            "\n".join(kernel["key"] for kernel in first["kernels"]),
            "\n".join(kernel["provider"] or "none" for kernel in first["kernels"]),
            _sees(first),
            _dims(first),
            _times(len(members), first["bytes_per_token"]),
            _times(len(members), first["bytes_per_request"]),
            first["reason"],
        )
    return table


def _attention_layer(
    descriptor: LayerDescriptor, shape: KVShape, dtype: torch.dtype, registry: KernelRegistry
) -> dict[str, Any]:
    return {
        **_layer(descriptor, registry.limit(descriptor), registry),
        "state": None,
        "num_heads": shape.num_kv_heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "bytes_per_token": shape.num_kv_heads * (shape.key_dim + shape.value_dim) * dtype.itemsize,
        "bytes_per_request": 0,
    }


def _recurrent_layer(layer: RecurrentLayer, model: CausalModel, registry: KernelRegistry) -> dict[str, Any]:
    descriptor, shape = layer.descriptor(model.state_mode), layer.shape
    limit = min((registry.limit(descriptor), layer.limit), key=lambda found: PLAN_KINDS.index(found.kind))
    return {
        **_layer(descriptor, limit, registry),
        "state": "convolution" if shape.op == "none" else shape.op,
        "num_heads": shape.num_heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "bytes_per_token": 0,
        "bytes_per_request": bytes_per_state(shape, model.dtype)[0],
    }


def _layer(descriptor: LayerDescriptor, limit: SpecLimit, registry: KernelRegistry) -> dict[str, Any]:
    needed = (descriptor.verify_key, *descriptor.other_keys, descriptor.commit_key)
    return {
        "name": descriptor.name,
        "kind": limit.kind,
        "reason": limit.reason,
        "kernels": [{"key": key, "provider": _provider(registry, key)} for key in needed if key is not None],
        "window": descriptor.window,
        "has_sinks": descriptor.has_sinks,
        "softcap": descriptor.softcap,
        "features": sorted(descriptor.features),
    }


def _provider(registry: KernelRegistry, key: str) -> str | None:
    kernel = registry.get(key)
    return None if kernel is None else f"{type(kernel).__module__}.{type(kernel).__qualname__}"


def _dims(layer: Mapping[str, Any]) -> str:
    if layer["num_heads"] == 0:
        return ""
    joint = " + " if layer["state"] is None else " x "
    same = layer["state"] is None and layer["key_dim"] == layer["value_dim"]
    dims = layer["key_dim"] if same else f"{layer['key_dim']}{joint}{layer['value_dim']}"
    return f"{layer['num_heads']} x {dims}"


def _times(count: int, size: int) -> str:
    return f"{count} x {size}" if size else ""


def _sees(layer: Mapping[str, Any]) -> str:
    if layer["state"] is not None:
        return f"state: {layer['state']}"
    parts = ["full" if layer["window"] is None else f"window {layer['window']}"]
    parts += ["sinks"] if layer["has_sinks"] else []
    parts += [] if layer["softcap"] is None else [f"soft cap {layer['softcap']:g}"]
    return ", ".join([*parts, *layer["features"]])
