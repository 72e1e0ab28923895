"""Find a model's attention layers by running it once: what does not call the hook as the table says is refused."""

from __future__ import annotations

from typing import Any

import torch

from specround.contract.errors import ModelError
from specround.models.attention import AttentionLayer, ForwardContext, HookCall
from specround.models.families import Family


def install_layers(module: Any, family: Family, context: ForwardContext) -> tuple[AttentionLayer, ...]:
    """Give every decoder block a layer and check on a forward of one row that each calls the hook as expected.

    Modules are found by what they do, not by their names: whichever module of a block calls the hook is its attention.

    Args:
        module: A causal language model whose attention implementation is the hook.
        family: Its entry in the table.
        context: What the layers share.

    Raises:
        ModelError: A block that does not call the hook exactly once, or whose call disagrees with the configuration.
    """
    config = module.config
    family.check(config)
    windows, softcap = family.layer_windows(config), family.layer_softcap(config)
    layers = [AttentionLayer(index, context, window, softcap) for index, window in enumerate(windows)]
    blocks = list(module.model.layers)
    if len(blocks) != len(layers):
        raise ModelError("num_hidden_layers", len(layers), f"the {len(blocks)} decoder blocks of {config.model_type!r}")
    for block, layer in zip(blocks, layers, strict=True):
        for part in block.modules():
            part.specround_layer = layer
    row = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    with torch.no_grad():
        module.model(input_ids=row, position_ids=row, use_cache=False)
    for block, layer in zip(blocks, layers, strict=True):
        call = _only_call(layer, config)
        _check_call(call, layer, family, config)
        for part in block.modules():
            if part is not call.module:
                del part.specround_layer
        layer.shape, layer.has_sinks, layer.calls = call.shape, call.has_sinks, None
    return tuple(layers)


def _only_call(layer: AttentionLayer, config: Any) -> HookCall:
    assert layer.calls is not None
    if len(layer.calls) != 1:
        found = f"layer {layer.index} calls it {len(layer.calls)} times"
        raise ModelError(
            "model type", config.model_type, f"one whose every layer calls the hook once (here {found}): not covered"
        )
    return layer.calls[0]


def _check_call(call: HookCall, layer: AttentionLayer, family: Family, config: Any) -> None:
    """Compare what the module asked for with what the configuration says."""
    where = f"layer {layer.index} of {config.model_type!r}"
    if call.others:
        raise ModelError("attention of " + where, list(call.others), "without arguments the hook does not know")
    windows = (layer.window, None) if family.window_in_mask_only else (layer.window,)
    if call.window not in windows:
        raise ModelError("sliding_window of " + where, call.window, f"{layer.window}, as the config says")
    if call.has_sinks != family.has_sinks:
        raise ModelError("sinks of " + where, call.has_sinks, f"{family.has_sinks}, as the table of families says")
    if call.softcap != layer.softcap:
        raise ModelError("softcap of " + where, call.softcap, f"{layer.softcap}, as the config says")
