"""The views: one frozen object per device hook, instead of a growing argument list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from specround.contract.accept import AcceptResult


@dataclass(frozen=True, eq=False, kw_only=True)
class SamplingView:
    """Sampling parameters of every request slot, on the device.

    Attributes:
        temperature: `[max_reqs]` float32; 0 = greedy.
    """

    temperature: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanView:
    """What `plan` sees: the step's requests before the target's forward.

    `[max_reqs]` tensors are persistent and indexed by `req_idx`; `[R]` tensors are in batch order.

    Attributes:
        req_idx: `[R]` int64, persistent slot of each request.
        num_computed_tokens: `[R]` int32, tokens whose KV is committed. In decode this is the root's position.
        root_token_ids: `[R]` int64, the last committed token; -1 for a prefill that does not end this step.
        max_rows: `[R]` int32, candidates the plan may use at most; 0 for a prefill that does not end this step, 1 for
            one that does.
        token_history: `[max_reqs, L]` int64, committed tokens by position; positions past the root are undefined.
        sampling: Sampling parameters by `req_idx`.
        seeds: `[max_reqs]` int64, the request's seed mod 2^64 as a signed integer.
        budget: Candidates (drafts + 1) that bounded this step's rows.
        draft_token_ids: `[max_reqs, K]` int64, the engine's own draft buffer, -1 = no draft. A chain speculator that
            overrides neither `plan` nor `accept` drafts into it.
        num_columns: C, the most candidates any request of the step may use: a host int.
    """

    req_idx: Tensor
    num_computed_tokens: Tensor
    root_token_ids: Tensor
    max_rows: Tensor
    token_history: Tensor
    sampling: SamplingView
    seeds: Tensor
    budget: int
    draft_token_ids: Tensor
    num_columns: int


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifyOutput:
    """What the target said about a plan's rows.

    Attributes:
        logits: `[N, V]` float32, processed (temperature applied for sampled requests). The logits of request r's
            column c are row `root_row[r] + c`.
        raw_logits: `[N, V]`, before any processing.
        row_start: `[R + 1]` int32, where each request's logits rows begin.
        root_row: `[R]` int32, logits row of each root. Meaningless for a request without candidates.
        num_computed_tokens: `[R]` int32, root position of each request.
        req_idx: `[R]` int64.
        sampling: Sampling parameters by `req_idx`.
        seeds: `[max_reqs]` int64.
    """

    logits: Tensor
    raw_logits: Tensor
    row_start: Tensor
    root_row: Tensor
    num_computed_tokens: Tensor
    req_idx: Tensor
    sampling: SamplingView
    seeds: Tensor


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step's committed tokens on the host, for drafters with `drafting="host"`. Batch order.

    Attributes:
        request_ids: The requests.
        req_idx: Their persistent slots.
        committed: Tokens committed by this step, empty for a prefill that did not end. Tokens past a stop condition
            may be included: the request then ends and `request_finished` carries what was kept.
        max_drafts: Drafts the next round can verify for each request.
    """

    request_ids: tuple[str, ...]
    req_idx: tuple[int, ...]
    committed: tuple[tuple[int, ...], ...]
    max_drafts: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class ProposeView:
    """What `propose` and `absorb` see: the state after commit, rows of the path in chain order.

    Attributes:
        req_idx: `[R]` int64.
        num_computed_tokens: `[R]` int32, after this step: the position of the next root.
        root_token_ids: `[R]` int64, the next root (the bonus); -1 where nothing was committed.
        max_rows: `[R]` int32, candidates this step allowed.
        token_history: `[max_reqs, L]` int64, committed tokens by position, this step's included.
        sampling: Sampling parameters by `req_idx`.
        seeds: `[max_reqs]` int64.
        budget: Candidates (drafts + 1) the next round may verify; drafts past `budget - 1` are not used.
        draft_token_ids: `[max_reqs, K]` int64, the engine's draft buffer: a chain drafter writes here, -1 = no draft.
        row_start: `[R + 1]` int32, where each request's rows begin in the packed tensors below.
        root_row: `[R]` int32, packed row of each root; `row_start[r + 1]` where the request had no candidates. Rows
            `row_start[r] .. root_row[r] - 1` are prompt rows of a prefill chunk.
        num_rows: Rows per request, batch order, known on the host.
        row_req_idx: `[T]` int64, persistent slot of each row's request.
        input_ids: `[T]` int64, tokens of the rows; after commit the path's rows stand in chain order from `root_row`.
        positions: `[T]` int64, token index of each row in its request, -1 for rows that were not committed.
        hidden_states: `[T, H]` as declared in `SpecResources.hidden_states`, chain order, or None.
        result: What was accepted.
        any_sampled: Whether some request of the step may be sampled rather than greedy, known on the host.
        host: The committed tokens on the host; only for `drafting="host"`.
    """

    req_idx: Tensor
    num_computed_tokens: Tensor
    root_token_ids: Tensor
    max_rows: Tensor
    token_history: Tensor
    sampling: SamplingView
    seeds: Tensor
    budget: int
    draft_token_ids: Tensor
    row_start: Tensor
    root_row: Tensor
    num_rows: tuple[int, ...]
    row_req_idx: Tensor
    input_ids: Tensor
    positions: Tensor
    hidden_states: Tensor | None
    result: AcceptResult
    any_sampled: bool = True
    host: HostStep | None = None
