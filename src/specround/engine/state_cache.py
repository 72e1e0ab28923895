"""`StateCache`: the recurrent states of every layer, and which blocks of them belong to which request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specround.contract import ConfigError
from specround.engine.config import EngineConfig
from specround.engine.memory import allocation
from specround.engine.state_pool import StatePool
from specround.kernels.registry import KernelRegistry
from specround.kernels.state_commit import StateTables
from specround.models.causal_lm import CausalModel
from specround.round import flush_rows


class StateCache:
    """State blocks of a model's recurrent layers. A block holds one state of every layer; block 0 is the null block.

    Args:
        model: The target; its recurrent layers are given caches and kernels.
        registry: Which kernels run.
        tables: The requests' blocks.
        num_blocks: Usable blocks.
    """

    def __init__(self, model: CausalModel, registry: KernelRegistry, tables: StateTables, num_blocks: int) -> None:
        self.tables, self.layers = tables, model.recurrent_layers
        model.bind_states(registry, num_blocks + 1, tables.num_row_slots)

    def start(self, req_idx: int, blocks: Sequence[int]) -> None:
        """Give a request its blocks; its state is that before the first token, zero."""
        self.tables.start(req_idx, blocks)
        for layer in self.layers:
            for _, cache in layer.caches():
                cache[blocks[0]].zero_()

    @torch.no_grad()
    def flush(self) -> None:
        """Fold what is pending of every request into its state, in every layer; afterwards nothing is pending."""
        if self.tables.mode == "slots":
            return
        every = torch.arange(self.tables.num_requests, device=self.tables.blocks.device)
        rows = flush_rows(self.tables, every)
        for layer in self.layers:
            layer.flush(rows)
        self.tables.pending_len.zero_()


def build_states(
    config: EngineConfig, model: CausalModel, registry: KernelRegistry, max_drafts: int, device: torch.device
) -> tuple[StateCache | None, StatePool | None]:
    """Allocate the recurrent states of every request that may run, or nothing for a target without recurrent layers.

    Args:
        config: The settings.
        model: The target.
        registry: Which kernels run.
        max_drafts: The most drafts per request and round, as declared.
        device: Where the states live.

    Raises:
        ConfigError: Fewer blocks than one request needs, or more than fits into memory.
    """
    if not model.recurrent_layers:
        if config.num_state_blocks is not None:
            allowed = f"None for model type {model.config.model_type!r}, which has no recurrent layers"
            raise ConfigError("num_state_blocks", config.num_state_blocks, allowed)
        return None, None
    tables = StateTables(config.state_mode, config.max_num_seqs + 1, max_drafts, device)
    field, num_blocks = "num_state_blocks", config.num_state_blocks
    if num_blocks is None:
        field, num_blocks = "max_num_seqs", config.max_num_seqs * tables.span
    if num_blocks < tables.span:
        allowed = f"at least {tables.span}: one request holds so many in state_mode={config.state_mode!r}"
        raise ConfigError(field, num_blocks, allowed)
    per_block, per_slot = model.state_bytes
    size = (num_blocks + 1) * per_block + tables.num_row_slots * per_slot
    what = f"{num_blocks} recurrent state blocks and the rows of {tables.num_requests} requests"
    with allocation(field, getattr(config, field), size, what, device):
        return StateCache(model, registry, tables, num_blocks), StatePool(num_blocks, tables.span)
