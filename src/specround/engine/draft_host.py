"""`EngineDraftHost`: runs a drafter's models inside the embedded engine, on the target's block table."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor

from specround.contract import ConfigError, DraftRows, ModelError, SpecResources
from specround.engine.device_state import DeviceState
from specround.kernels.reference import AttentionKernel, WriteKV
from specround.kernels.registry import KernelRegistry
from specround.kernels.tree_attention.rows import AttentionRows
from specround.models.attention import KVShape
from specround.models.causal_lm import CausalModel
from specround.models.pretrained import load_pretrained
from specround.models.sources import resolve_model
from specround.round.draft_rows import DraftRowLayout, DraftSlots


class HostedDraftModel:
    """A `DraftModel` whose attention runs over the engine's paged KV; made by `EngineDraftHost.load_model`."""

    def __init__(self, model: CausalModel, host: EngineDraftHost) -> None:
        self.model, self._host = model, host

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of `logits`."""
        return self.model.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest context the model was made for."""
        return self.model.max_model_len

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[N, H]` of the rows announced by `begin`."""
        rows, slots = self._host.current
        ids = token_ids.clamp(0, self.vocab_size - 1)
        return self.model.forward(ids, positions.clamp(0, self.max_model_len - 1), slots, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[M, V]` float32."""
        return self.model.logits(hidden).float()


class EngineDraftHost:
    """Draft layers share block ids with the target: a request's block is a page in every layer.

    Args:
        target: The target model, for shared weights.
        state: Per-request device state.
        resources: Declared resources, for their draft layers.
    """

    def __init__(self, target: CausalModel, state: DeviceState, resources: SpecResources) -> None:
        self._target, self._state = target, state
        self._layers = resources.draft_layers
        self._models: list[HostedDraftModel] = []
        self._caches: dict[str, tuple[Tensor, Tensor]] = {}
        self._kernels: dict[str, AttentionKernel] = {}
        self._write_kv: WriteKV | None = None
        self._current: tuple[AttentionRows, Tensor] | None = None
        self._layout = DraftRowLayout(state.null_req_idx + 1, state.block_tables.device)
        self.max_kv_len = 0
        """Upper bound of the slots any row may see; set by the runner for each step."""

    @property
    def max_num_seqs(self) -> int:
        """Largest `req_idx` + 1."""
        return self._state.null_req_idx

    @property
    def max_model_len(self) -> int:
        """Longest context of the target."""
        return self._state.max_model_len

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self._target.vocab_size

    @property
    def models(self) -> tuple[CausalModel, ...]:
        """The loaded draft models."""
        return tuple(hosted.model for hosted in self._models)

    @property
    def current(self) -> tuple[AttentionRows, Tensor]:
        """Rows and flat slots announced by the last `begin`."""
        assert self._current is not None, "begin() comes before forward() and attend()"
        return self._current

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Target weights by checkpoint name, shared.

        Raises:
            ConfigError: A name is unknown.
        """
        weights = self._target.named_parameters()
        for name in names:
            if name not in weights:
                close = difflib.get_close_matches(name, weights, n=3) or sorted(weights)[:3]
                raise ConfigError("weight name", name, f"a parameter of the target, such as {', '.join(close)}")
        return {name: weights[name] for name in names}

    def load_model(self, path: str) -> HostedDraftModel:
        """Load a draft model; its layers get KV in the engine's pool.

        Raises:
            ModelError: It cannot be loaded, or it has recurrent layers.
        """
        source = resolve_model(path)
        pretrained = load_pretrained(source, self._target.dtype, self._state.block_tables.device)
        causal = CausalModel(pretrained, name=f"draft{len(self._models)}")
        if causal.recurrent_layers:
            allowed = "a model type with attention layers only: states of draft models are not kept"
            raise ModelError("model_type", causal.config.model_type, f"{allowed} (draft model {source.name!r})")
        model = HostedDraftModel(causal, self)
        self._models.append(model)
        return model

    def kv_layers(self) -> list[tuple[KVShape, torch.dtype]]:
        """Shape and dtype of every draft layer, in the order `bind` takes caches."""
        dtype = self._target.dtype
        own = [KVShape(num_kv_heads=x.num_kv_heads, key_dim=x.head_dim, value_dim=x.head_dim) for x in self._layers]
        return [(shape, dtype) for shape in own] + [
            (shape, hosted.model.dtype) for hosted in self._models for shape in hosted.model.kv_shapes
        ]

    def bind(self, registry: KernelRegistry, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Give every draft layer its cache and kernel."""
        remaining = list(caches)
        self._write_kv = registry.write_kv
        for layer in self._layers:
            self._caches[layer.name] = remaining.pop(0)
            key = "attention:full/verify" if layer.window is None else "attention:sliding/verify"
            self._kernels[layer.name] = registry.get(key)  # type: ignore[assignment]
        for hosted in self._models:
            count = len(hosted.model.layers)
            hosted.model.bind(registry, remaining[:count])
            remaining = remaining[count:]

    def begin(self, rows: DraftRows) -> None:
        """Lay out the rows of the next draft forward."""
        state = self._state
        held = DraftSlots(
            block_tables=state.block_tables,
            num_allocated_slots=state.num_allocated_slots,
            block_size=state.block_size,
            max_kv_len=self.max_kv_len,
        )
        self._current = self._layout.lay_out(rows, held)

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' KV to the layer's cache and attend."""
        if layer not in self._caches:
            known = ", ".join(self._caches) or "none declared"
            raise ConfigError("draft layer", layer, f"one of the declared ones: {known}")
        rows, slots = self.current
        key_cache, value_cache = self._caches[layer]
        assert self._write_kv is not None, "layers are bound before they attend"
        self._write_kv(key_cache, value_cache, key, value, slots)
        window = next(item.window for item in self._layers if item.name == layer)
        scale = query.shape[-1] ** -0.5
        return self._kernels[layer](
            query, key_cache, value_cache, rows, scale=scale, window=window, sinks=None, softcap=None
        )
