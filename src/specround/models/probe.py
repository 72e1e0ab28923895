"""Find a model's layers by running it once: what does not call the hook or a mixer as the table says is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specround.contract.errors import ModelError
from specround.models.attention import AttentionLayer, ForwardContext, HookCall
from specround.models.family import Family
from specround.models.recurrent.install import MIXERS, install_mixer
from specround.models.recurrent.layer import RecurrentLayer
from specround.models.recurrent.mixer import Mixer


@dataclass(frozen=True, kw_only=True)
class InstalledLayers:
    """The layers of a model, in block order.

    Attributes:
        attention: They keep keys and values.
        recurrent: They keep states.
    """

    attention: tuple[AttentionLayer, ...]
    recurrent: tuple[RecurrentLayer, ...]


def install_layers(
    module: Any,
    family: Family,
    context: ForwardContext,
    name: str = "target",
    mixers: Mapping[str, type[Mixer]] = MIXERS,
) -> InstalledLayers:
    """Give every decoder block its layers and check on a forward of one row that each is called as expected.

    Attention is found by what it does, not by its name: whichever module of a block calls the hook is its attention.
    Recurrent modules are found by their class. No cache exists yet: the hook and the mixers' ops give zeros.

    Args:
        module: A causal language model whose attention implementation is the hook.
        family: Its entry in the table.
        context: What the layers share.
        name: Prefix of the recurrent layers' names.
        mixers: Mixer of each recurrent Hugging Face class.

    Raises:
        ModelError: A block that does not call the hook or its mixer exactly once where the configuration says so, or
            whose call disagrees with the configuration.
    """
    config = module.config
    family.check(config)
    wanted, softcap = family.blocks(config), family.layer_softcap(config)
    blocks = list(module.base_model.layers)
    if len(blocks) != len(wanted):
        raise ModelError("num_hidden_layers", len(wanted), f"the {len(blocks)} decoder blocks of {config.model_type!r}")
    layers: list[AttentionLayer] = []
    installed = []
    for place, (block, content) in enumerate(zip(blocks, wanted, strict=True)):
        mixer = install_mixer(block, place, content.recurrent, _where(place, config), mixers)
        if mixer is not None:
            installed.append(mixer)
        if content.attention:
            layers.append(AttentionLayer(len(layers), context, content.window, softcap, place))
            for part in block.modules():
                part.specround_layer = layers[-1]
    row = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    with torch.no_grad():
        module.base_model(input_ids=row, position_ids=row, use_cache=False)
    for layer in layers:
        call = _only_call(layer, config)
        _check_call(call, layer, family, config)
        for part in blocks[layer.block].modules():
            if part is not call.module:
                del part.specround_layer
        layer.shape, layer.has_sinks, layer.calls = call.shape, call.has_sinks, None
    recurrent = (
        mixer.finish(f"{name}.{mixer.block}.state", context, _where(mixer.block, config)) for mixer in installed
    )
    return InstalledLayers(attention=tuple(layers), recurrent=tuple(recurrent))


def _where(block: int, config: Any) -> str:
    return f"layer {block} of {config.model_type!r}"


def _only_call(layer: AttentionLayer, config: Any) -> HookCall:
    assert layer.calls is not None
    if len(layer.calls) != 1:
        found = f"layer {layer.block} calls it {len(layer.calls)} times"
        raise ModelError(
            "model type", config.model_type, f"one whose every layer calls the hook once (here {found}): not covered"
        )
    return layer.calls[0]


def _check_call(call: HookCall, layer: AttentionLayer, family: Family, config: Any) -> None:
    """Compare what the module asked for with what the configuration says."""
    where = _where(layer.block, config)
    if call.others:
        raise ModelError("attention of " + where, list(call.others), "without arguments the hook does not know")
    windows = (layer.window, None) if family.window_in_mask_only else (layer.window,)
    if call.window not in windows:
        raise ModelError("sliding_window of " + where, call.window, f"{layer.window}, as the config says")
    if call.has_sinks != family.has_sinks:
        raise ModelError("sinks of " + where, call.has_sinks, f"{family.has_sinks}, as the table of families says")
    if call.softcap != layer.softcap:
        raise ModelError("softcap of " + where, call.softcap, f"{layer.softcap}, as the config says")
