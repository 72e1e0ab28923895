"""The attention hook: every attention layer of a Hugging Face module attends through a kernel over paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import AttentionInterface

from specround.contract.errors import ModelError

if TYPE_CHECKING:
    from specround.kernels.reference import AttentionKernel, WriteKV
    from specround.kernels.state_rows import StateRows
    from specround.kernels.tree_attention.rows import AttentionRows

HOOK_NAME = "specround"
"""Name in transformers' attention interface. No mask function has it, so modules pass no mask of their own."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one layer stores per token: `num_kv_heads` keys of `key_dim` and values of `value_dim` elements."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(kw_only=True)
class ForwardContext:
    """What a model's layers share during one forward.

    Attributes:
        rows: What each row sees.
        slots: `[N]` int64, flat slot of each row, 0 = padding.
        states: Which state each row starts from; None in models without recurrent layers.
    """

    rows: AttentionRows | None = None
    slots: Tensor | None = None
    states: StateRows | None = None


@dataclass(frozen=True, kw_only=True)
class HookCall:
    """What one call of the hook asked for; recorded while a model is probed.

    Attributes:
        module: The attention module.
        shape: What it would store per token.
        window: The window it named, or None.
        has_sinks: It gave sinks.
        softcap: The soft cap it named, or None.
        others: Names of other arguments that change attention, such as a mask of its own.
    """

    module: nn.Module
    shape: KVShape
    window: int | None
    has_sinks: bool
    softcap: float | None
    others: tuple[str, ...]


class AttentionLayer:
    """One layer's cache and kernel; the module's attention calls `attend`.

    Args:
        index: Place among the model's attention layers, from 0.
        context: Shared with the other layers of the model.
        window: Sliding window that the configuration gives this layer.
        softcap: Soft cap of the scores.
        block: Place of its decoder block, of which some may have no attention; None = `index`.
    """

    def __init__(
        self,
        index: int,
        context: ForwardContext,
        window: int | None = None,
        softcap: float | None = None,
        block: int | None = None,
    ) -> None:
        self.index, self.context, self.window, self.softcap = index, context, window, softcap
        self.block = index if block is None else block
        self.shape: KVShape | None = None
        self.has_sinks = False
        self.calls: list[HookCall] | None = []
        """Calls while the model is probed; None once it is."""
        self._kernel: AttentionKernel | None = None
        self._write_kv: WriteKV | None = None
        self._key_cache: Tensor | None = None
        self._value_cache: Tensor | None = None

    def bind(self, kernel: AttentionKernel, write_kv: WriteKV, key_cache: Tensor, value_cache: Tensor) -> None:
        """Set the kernels and the caches `[S, Hkv, D]` and `[S, Hkv, Dv]`."""
        self._kernel, self._write_kv, self._key_cache, self._value_cache = kernel, write_kv, key_cache, value_cache

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """Write keys and values, then attend with the layer's window and soft cap.

        Args:
            query: `[N, H, D]`.
            key: `[N, Hkv, D]`.
            value: `[N, Hkv, Dv]`.
            scale: Multiplies the scores.
            sinks: `[H]`, or None.

        Returns:
            `[N, H, Dv]`.
        """
        rows, slots = self.context.rows, self.context.slots
        assert self._kernel is not None
        assert self._write_kv is not None
        assert self._key_cache is not None
        assert self._value_cache is not None
        assert rows is not None
        assert slots is not None
        self._write_kv(self._key_cache, self._value_cache, key, value, slots)
        return self._kernel(
            query,
            self._key_cache,
            self._value_cache,
            rows,
            scale=scale,
            window=self.window,
            sinks=sinks,
            softcap=self.softcap,
        )


_INERT = frozenset(
    {
        "cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "use_cache",
    }
)
"""Arguments that pass by the hook and do not change attention over the engine's own cache."""


def _attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The function transformers calls: `[1, H, T, D]` in, `[1, T, H, Dv]` out."""
    layer = getattr(module, "specround_layer", None)
    if not isinstance(layer, AttentionLayer):
        raise ModelError("attention module", type(module).__name__, "one inside the decoder blocks: it is not covered")
    packed = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if layer.calls is not None:
        named = others | {"attention_mask": attention_mask, "is_causal": getattr(module, "is_causal", True) is not True}
        layer.calls.append(
            HookCall(
                module=module,
                shape=KVShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3]),
                window=sliding_window,
                has_sinks=s_aux is not None,
                softcap=softcap,
                others=tuple(
                    name
                    for name, value in named.items()
                    if value is not None and value is not False and name not in _INERT
                ),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return layer.attend(packed[0], packed[1], packed[2], scale, s_aux)[None], None


AttentionInterface.register(HOOK_NAME, _attention_hook)
