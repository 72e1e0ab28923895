"""Run a model of ours outside the engine: packed prompts, then a tree over each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specround.engine.kv_cache import KVCache
from specround.kernels.registry import KernelRegistry
from specround.kernels.state_rows import StateMode, StateRows
from specround.kernels.tree import tree_tables
from specround.kernels.tree_attention.rows import RowContext, lay_out_rows
from specround.models.causal_lm import CausalModel
from specround.models.pretrained import load_pretrained
from specround.models.sources import resolve_model

BLOCK = 4
CPU = torch.device("cpu")


class PackedForward:
    """A model with blocks for `count` requests of up to `longest` tokens; request r owns a shuffled set of blocks."""

    def __init__(
        self,
        path: str | Path,
        count: int,
        longest: int,
        dtype: torch.dtype = torch.float32,
        state_mode: StateMode = "replay",
    ) -> None:
        self.model = CausalModel(load_pretrained(resolve_model(str(path)), dtype, CPU), state_mode=state_mode)
        each = -(-longest // BLOCK)
        shapes = [(shape, self.model.dtype) for shape in self.model.kv_shapes]
        self.cache = KVCache(shapes, count * each, BLOCK, CPU)
        self.model.bind(KernelRegistry(()), self.cache.layers)
        shuffled = torch.randperm(count * each, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = shuffled.view(count, each)

    @torch.no_grad()
    def extend(self, requests: Sequence[Sequence[int]], start: Sequence[int]) -> Tensor:
        """Logits of each request's tokens, which stand at `start[r] ...`; all packed into one forward."""
        counts = [len(tokens) for tokens in requests]
        index = torch.cat([torch.arange(s, s + n) for s, n in zip(start, counts, strict=True)])
        return self._forward(requests, index, index, index + 1, None, None, list(start))

    @torch.no_grad()
    def verify(self, trees: Sequence[Sequence[int]], parents: Tensor, root: Sequence[int]) -> Tensor:
        """Logits of trees: column c of request r is token `trees[r][c]`, column 0 stands at `root[r]`."""
        columns = parents.shape[1]
        tables = tree_tables(parents)
        roots = torch.tensor(root).repeat_interleave(columns)
        depth = tables.depth.to(torch.int64)
        slots = roots + torch.arange(columns).repeat(len(trees))
        return self._forward(
            trees, roots + depth.flatten(), slots, roots, tables.ancestors.flatten(), depth, list(root)
        )

    def _forward(
        self,
        requests: Sequence[Sequence[int]],
        positions: Tensor,
        slots: Tensor,
        context_len: Tensor,
        bits: Tensor | None,
        offsets: Tensor | None,
        base: list[int],
        states: StateRows | None = None,
    ) -> Tensor:
        counts = [len(tokens) for tokens in requests]
        owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        kv_len = [start + count for start, count in zip(base, counts, strict=True)]
        context = RowContext(
            row_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            context_len=context_len,
            positions=positions,
            kv_len=torch.tensor(kv_len),
            base=torch.tensor(base),
            bits=bits,
            key_offsets=offsets,
            block_tables=self.tables[: len(counts)],
            block_size=BLOCK,
        )
        rows = lay_out_rows(counts, kv_len, context)
        flat = self.tables[owner, slots // BLOCK] * BLOCK + slots % BLOCK
        ids = torch.tensor([token for tokens in requests for token in tokens])
        return self.model.logits(self.model.forward(ids, positions, flat, rows, states))
