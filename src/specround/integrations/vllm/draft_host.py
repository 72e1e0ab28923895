"""`VllmDraftHost`: what a drafter gets of vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from specround.contract import ConfigError, DraftRows
from specround.integrations.vllm.requests import RequestTable


class VllmDraftHost:
    """Sizes and shared weights; models of a drafter are refused.

    Args:
        target: vLLM's model.
        table: The requests' rows.
        vocab_size: Size of the target's vocabulary.
    """

    def __init__(self, target: Any, table: RequestTable, vocab_size: int) -> None:
        self._target, self._table, self._vocab_size = target, table, vocab_size

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
        return self._vocab_size

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Target weights by vLLM's parameter names, shared; vLLM merges some projections.

        Raises:
            ConfigError: A name is unknown.
        """
        weights = dict(self._target.named_parameters())
        for name in names:
            if name not in weights:
                close = difflib.get_close_matches(name, weights, n=3) or sorted(weights)[:3]
                raise ConfigError("weight name", name, f"a parameter of vLLM's model, such as {', '.join(close)}")
        return {name: weights[name] for name in names}

    def load_model(self, path: str) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("speculative_config.model", path, _NO_DRAFT_KV)

    def begin(self, rows: DraftRows) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("draft rows", rows.num_rows, _NO_DRAFT_KV)

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("draft layer", layer, _NO_DRAFT_KV)


_NO_DRAFT_KV = "left out in vLLM: KV of a drafter's models is not hosted there yet; use the embedded engine"
