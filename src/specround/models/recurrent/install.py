"""Put our mixers in the place of Hugging Face's recurrent modules, and give each its layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from specround.contract.errors import ModelError
from specround.models.recurrent.gated_delta_net import OlmoHybridMixer, Qwen3NextMixer, Qwen35Mixer
from specround.models.recurrent.kimi_delta import KimiDeltaMixer
from specround.models.recurrent.layer import RecurrentLayer
from specround.models.recurrent.mamba1 import FalconMambaMixer, JambaMixer, MambaMixer
from specround.models.recurrent.mamba2 import FalconH1Mixer, Mamba2Mixer
from specround.models.recurrent.mixer import Mixer, RecordedOps, declared_limit
from specround.models.recurrent.short_conv import ShortConvMixer

if TYPE_CHECKING:
    from specround.models.attention import ForwardContext


def mixers_by_class(mixers: Iterable[type[Mixer]]) -> dict[str, type[Mixer]]:
    """Name of a Hugging Face class -> the mixer whose own body says that it replaces it."""
    return {name: mixer for mixer in mixers for name in vars(mixer).get("replaces", ())}


MIXERS: Final[Mapping[str, type[Mixer]]] = mixers_by_class(
    (
        FalconH1Mixer,
        FalconMambaMixer,
        JambaMixer,
        KimiDeltaMixer,
        Mamba2Mixer,
        MambaMixer,
        OlmoHybridMixer,
        Qwen35Mixer,
        Qwen3NextMixer,
        ShortConvMixer,
    )
)
"""The built-in mixers."""


class InstalledMixer:
    """A mixer in a block, first with a recording instead of caches, then with its layer.

    Args:
        mixer: Ours; its module's forward is replaced.
        block: Place of the decoder block.
    """

    def __init__(self, mixer: Mixer, block: int) -> None:
        self.mixer, self.block = mixer, block
        self._recorded = RecordedOps(mixer.shape)
        mixer.ops = self._recorded
        mixer.module.forward = mixer.forward

    def finish(self, name: str, context: ForwardContext, where: str) -> RecurrentLayer:
        """Check what was recorded in one forward, and connect the layer.

        Args:
            name: The layer's name.
            context: What the layers share.
            where: The block, for messages.

        Raises:
            ModelError: The mixer did not call each of its ops once, with the sizes that it stores.
        """
        if self._recorded.calls != self._recorded.expected:
            raise ModelError(f"recurrent ops of {where}", self._recorded.calls, f"{self._recorded.expected}")
        layer = RecurrentLayer(name, context, self.mixer.shape, declared_limit(type(self.mixer)))
        self.mixer.ops = layer
        return layer


def install_mixer(
    block: nn.Module, place: int, recurrent: bool, where: str, mixers: Mapping[str, type[Mixer]] = MIXERS
) -> InstalledMixer | None:
    """Replace the recurrent module of a decoder block.

    Args:
        block: The block.
        place: Its index.
        recurrent: Whether the configuration says that it has one.
        where: The block, for messages.
        mixers: Mixer of each Hugging Face class.

    Raises:
        ModelError: There is no module with a mixer, several, or one that the configuration does not announce; or a
            module convolves over rows and no mixer replaces it.
    """
    found: list[Any] = [part for part in block.modules() if type(part).__name__ in mixers]
    if len(found) != int(recurrent):
        classes = [type(part).__name__ for part in found] or sorted({type(part).__name__ for part in block.children()})
        raise ModelError(f"recurrent modules of {where}", classes, f"{int(recurrent)} of {sorted(mixers)}")
    covered = {id(part) for module in found for part in module.modules()}
    for name, part in block.named_modules():
        if isinstance(part, nn.Conv1d) and id(part) not in covered:
            owner = type(block.get_submodule(name.rpartition(".")[0])).__name__
            raise ModelError(f"recurrent modules of {where}", owner, f"of {sorted(mixers)}: it convolves over rows")
    return InstalledMixer(mixers[type(found[0]).__name__](found[0]), place) if found else None
