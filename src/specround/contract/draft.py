"""The draft-module protocol: how a drafter runs models inside whichever host carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftRows:
    """Rows of one draft forward, grouped by request.

    A row with parent -1 continues its request's plain context: it sees every slot up to its own. The last such row of a
    request is the base of the tree that later rows grow: a row with a parent sees every slot up to the base, its
    ancestors' slots above it, and itself. Bases and parents are remembered between calls until the next row with parent
    -1, so a drafter grows a tree level by level. A tree has at most 63 slots above its base; a longer chain is
    announced with parents of -1. A slot for which the request holds no block counts as padding.

    Attributes:
        req_idx: `[N]` int64, persistent slot of each row's request; rows of one request stand together.
        positions: `[N]` int64, token index the row sits at (root position + depth).
        slots: `[N]` int64, chain slot (token index) that receives the row's draft KV, -1 = padding: nothing is written
            and the row's output is meaningless.
        parents: `[N]` int64, slot of the parent row, or -1.
        num_rows: Rows of each request in order, known on the host; sums to N.
    """

    req_idx: Tensor
    positions: Tensor
    slots: Tensor
    parents: Tensor
    num_rows: Sequence[int]


class DraftModel(Protocol):
    """A whole language model that drafts; its attention runs through the host's paged KV."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary of `logits`."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context the model was made for, in tokens."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Run the rows announced by `DraftHost.begin`.

        Args:
            token_ids: `[N]` int64; ids outside the vocabulary are clamped into it.
            positions: `[N]` int64, rotary positions.

        Returns:
            Hidden states `[N, H]`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[M, V]` float32 of hidden states `[M, H]`."""
        ...


class DraftHost(Protocol):
    """What the engine offers a drafter that runs models. Draft modules import neither transformers nor vLLM."""

    @property
    def max_num_seqs(self) -> int:
        """Largest `req_idx` + 1; per-request buffers have this many rows, plus one that padding uses."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context of the target, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        ...

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Target weights by parameter name (for example the embeddings), shared, not copied.

        Raises:
            ConfigError: A name is unknown; the message lists close ones.
        """
        ...

    def load_model(self, path: str) -> DraftModel:
        """Load a draft model; its attention layers get KV in the engine's pool, on the target's block table."""
        ...

    def begin(self, rows: DraftRows) -> None:
        """Announce the rows of the next draft forward; lays out slots and masks for every draft layer."""
        ...

    def attend(self, layer: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' key and value to the layer's cache and attend.

        Args:
            layer: Name of a declared `DraftLayer`.
            query: `[N, num_heads, head_dim]`.
            key: `[N, num_kv_heads, head_dim]`.
            value: `[N, num_kv_heads, head_dim]`.

        Returns:
            `[N, num_heads, head_dim]`.
        """
        ...
