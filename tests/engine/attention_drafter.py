"""A draft module to test the draft host with: attention layers over the target's embeddings, and a dense reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specround import BaseSpeculator, SpecResources, SpeculatorConfig, register_speculator
from specround.contract import DraftHost, DraftRows
from specround.contract.resources import DraftLayer
from specround.kernels.reference import ReferenceAttention

EMBEDDING = "model.embed_tokens.weight"
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WINDOWS = (5, 2)
"""One that ends in the plain context, and one so short that it ends inside the drafted trees."""
LAYERS = (
    DraftLayer(name="full", num_kv_heads=KV_HEADS, head_dim=HEAD_DIM),
    DraftLayer(name="near", num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=WINDOWS[0]),
    DraftLayer(name="nearest", num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=WINDOWS[1]),
)


class Counting(ReferenceAttention):
    """The built-in kernel under a name; remembers the window of each call."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def __call__(self, *args: Any, **values: Any) -> Tensor:
        self.windows.append(values["window"])
        return super().__call__(*args, **values)


class Module:
    """Query, key and value of a token at a position; the same for every layer but for its weights.

    Args:
        embedding: `[V, H]`.
        seed: Of the weights.
    """

    def __init__(self, embedding: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = embedding
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.weights = [torch.randn(size, embedding.shape[1], generator=generator) for size in sizes]

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[N, heads, dim]` each; the position turns the embedding, so that a misplaced row shows."""
        angle = positions[:, None] * torch.linspace(0.1, 2.0, self.embedding.shape[1])
        rows = self.embedding[tokens] * (1.0 + torch.cos(angle))
        return tuple((rows @ weight.T).view(len(tokens), -1, HEAD_DIM) for weight in self.weights)

    def dense(self, tokens: Sequence[int], positions: Sequence[int], window: int | None) -> Tensor:
        """What the last of these rows sees when it sees all of them, but for a window: `[heads, dim]`."""
        at = torch.tensor(positions)
        query, key, value = self.project(torch.tensor(tokens), at)
        repeats = HEADS // KV_HEADS
        scores = torch.einsum("hd,nhd->hn", query[-1], key.repeat_interleave(repeats, 1)) / HEAD_DIM**0.5
        if window is not None:
            scores = scores.masked_fill(at[-1] - at >= window, float("-inf"))
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), value.repeat_interleave(repeats, 1))


@dataclass(frozen=True)
class Row:
    """A row of a draft forward: its token, position, slot and parent slot."""

    token: int
    position: int
    slot: int
    parent: int = -1


@register_speculator("attention_drafter")
@dataclass(frozen=True, kw_only=True)
class AttentionDrafterConfig(SpeculatorConfig):
    """Settings.

    Attributes:
        draft: Called with the speculator and the view in `propose` and `absorb`.
        names: Weights to load.
        kernels: Kernels by key that overlay the built-in ones.
    """

    draft: Callable[[AttentionDrafter, Any], None] | None = None
    names: tuple[str, ...] = (EMBEDDING,)
    kernels: dict[str, Counting] = field(default_factory=dict)

    @property
    def spec_kernel_providers(self) -> Any:
        return (lambda: self.kernels,)

    def declare_resources(self):
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, draft_layers=LAYERS)

    def create(self, resources, host, device):
        return AttentionDrafter(self, host)


class AttentionDrafter(BaseSpeculator):
    """Absorbs every committed row into both layers, then lets the test draft."""

    def __init__(self, config: AttentionDrafterConfig, host: DraftHost) -> None:
        self.config, self.host = config, host
        self.loaded = host.load(config.names)
        self.modules = {layer.name: Module(self.loaded[EMBEDDING].detach(), n) for n, layer in enumerate(LAYERS)}

    def absorb(self, view):
        self.propose(view)

    def propose(self, view):
        rows = DraftRows(
            req_idx=view.row_req_idx,
            positions=view.positions.clamp(min=0),
            slots=view.positions,
            parents=torch.full_like(view.positions, -1),
            num_rows=view.num_rows,
        )
        self.absorbed = self.attend(rows, view.input_ids)
        if self.config.draft is not None:
            self.config.draft(self, view)

    def forward(self, by_request: Sequence[tuple[int, Sequence[Row]]]) -> dict[str, Tensor]:
        """Run rows given by request slot."""
        flat = [row for _, rows in by_request for row in rows]
        announced = DraftRows(
            req_idx=torch.tensor([slot for slot, rows in by_request for _ in rows]),
            positions=torch.tensor([row.position for row in flat]),
            slots=torch.tensor([row.slot for row in flat]),
            parents=torch.tensor([row.parent for row in flat]),
            num_rows=tuple(len(rows) for _, rows in by_request),
        )
        return self.attend(announced, torch.tensor([row.token for row in flat]))

    def attend(self, rows: DraftRows, tokens: Tensor) -> dict[str, Tensor]:
        """Outputs of every layer, by name."""
        self.host.begin(rows)
        return {
            name: self.host.attend(name, *module.project(tokens, rows.positions))
            for name, module in self.modules.items()
        }
