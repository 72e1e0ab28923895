"""`VllmDraftHost`: runs a drafter's models inside vLLM, on the target's block table."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig, replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model

from specround.contract import ConfigError, DraftRows
from specround.integrations.vllm.attention import RoundMetadata
from specround.integrations.vllm.draft_layers import DraftLayers
from specround.integrations.vllm.requests import RequestTable
from specround.kernels.tree_attention.rows import AttentionRows
from specround.round.draft_rows import DraftRowLayout, DraftSlots


class HostedDraftModel:
    """A `DraftModel` of vLLM whose attention runs over the target's paged KV.

    Args:
        model: vLLM's model.
        config: Its own vLLM configuration.
        layers: Names of its attention layers.
        host: Lays out its rows.
    """

    def __init__(self, model: Any, config: Any, layers: Sequence[str], host: VllmDraftHost) -> None:
        self._model, self._config, self._layers, self._host = model, config, tuple(layers), host

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of `logits`."""
        return int(self._config.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Longest context the model was made for."""
        return int(self._config.model_config.max_model_len)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[N, H]` of the rows announced by `begin`."""
        rows, slots = self._host.current
        written = torch.where(slots > 0, slots, -1)
        metadata = RoundMetadata(rows, written, rows.num_rows)
        ids = token_ids.clamp(0, self.vocab_size - 1)
        places = positions.clamp(0, self.max_model_len - 1)
        with set_forward_context(
            dict.fromkeys(self._layers, metadata),
            self._config,
            num_tokens=rows.num_rows,
            slot_mapping=dict.fromkeys(self._layers, written),
        ):
            hidden: Tensor = self._model(input_ids=ids, positions=places)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[M, V]` float32."""
        return self._model.compute_logits(hidden).float()  # type: ignore[no-any-return]


class VllmDraftHost:
    """Draft layers share block ids with the target: a request's block is a page in every layer.

    Args:
        runner: vLLM's runner with the target loaded.
        table: The requests' rows.
        layers: Layers that the drafter declares.
    """

    def __init__(self, runner: Any, table: RequestTable, layers: DraftLayers) -> None:
        self._runner, self._table, self._layers = runner, table, layers
        self._layout = DraftRowLayout(table.max_num_seqs + 1, runner.device)
        self._current: tuple[AttentionRows, Tensor] | None = None
        self._num_models = 0

    @property
    def max_num_seqs(self) -> int:
        """Largest `req_idx` + 1."""
        return self._table.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """Longest context of the target."""
        return self._table.max_model_len

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return int(self._runner.vocab_size)

    @property
    def current(self) -> tuple[AttentionRows, Tensor]:
        """Rows and flat slots announced by the last `begin`."""
        assert self._current is not None, "begin() comes before forward() and attend()"
        return self._current

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Target weights by vLLM's parameter names, shared; vLLM merges some projections.

        Raises:
            ConfigError: A name is unknown.
        """
        weights = dict(self._runner.model.named_parameters())
        for name in names:
            if name not in weights:
                close = difflib.get_close_matches(name, weights, n=3) or sorted(weights)[:3]
                raise ConfigError("weight name", name, f"a parameter of vLLM's model, such as {', '.join(close)}")
        return {name: weights[name] for name in names}

    def load_model(self, path: str) -> HostedDraftModel:
        """Load a draft model as vLLM loads models; its layers get KV beside the target's.

        Raises:
            ConfigError: It has layers without attention.
        """
        target = self._runner.vllm_config
        model_config = ModelConfig(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=True,
            dtype=target.model_config.dtype,
            enforce_eager=True,
            trust_remote_code=target.model_config.trust_remote_code,
        )
        for name in ("is_hybrid", "is_attention_free", "use_mla", "is_encoder_decoder", "is_multimodal_model"):
            if getattr(model_config, name):
                raise ConfigError("speculative_config.model", path, f"a decoder of attention layers, not {name}")
        config = replace(target, model_config=model_config, quant_config=None)
        layers = target.compilation_config.static_forward_context
        before = set(layers)
        model = get_model(vllm_config=config, prefix=f"draft{self._num_models}")
        self._num_models += 1
        return HostedDraftModel(model, config, [name for name in layers if name not in before], self)

    def begin(self, rows: DraftRows) -> None:
        """Lay out the rows of the next draft forward."""
        tables = self._runner.block_tables
        block_size = int(self._runner.kernel_block_sizes[0])
        block_table = torch.nn.functional.pad(tables.block_tables[0].gpu.to(torch.int64), (0, 0, 0, 1))
        allocated = torch.nn.functional.pad(tables.num_blocks.gpu[0].to(torch.int64) * block_size, (0, 1))
        held = DraftSlots(
            block_tables=block_table,
            num_allocated_slots=allocated,
            block_size=block_size,
            max_kv_len=self._table.max_kv_len,
        )
        self._current = self._layout.lay_out(rows, held)

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' KV to the layer's cache and attend.

        Raises:
            ConfigError: No such layer was declared.
        """
        rows, slots = self.current
        return self._layers.attend(layer, query, key, value, rows, slots)
