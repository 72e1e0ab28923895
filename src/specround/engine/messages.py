"""Plain messages between the engine core and its front end, and between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from specround.round import StepShape


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A request as the core gets it.

    Attributes:
        request_id: Unique among unfinished requests.
        prompt_token_ids: At least one token.
        temperature: 0 = greedy.
        seed: Mod 2^64.
        max_tokens: Most tokens to generate; already capped by the context.
        stop_token_ids: Ids that stop, end-of-sequence ids excluded.
        eos_token_ids: End-of-sequence ids that stop; empty when they are ignored.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RoundTrace:
    """One request's round, for display: the verified columns and the path kept.

    Attributes:
        token_ids: Tokens of the used columns, root first.
        parents: Parent column of each, -1 for the root.
        path: Columns kept.
        committed: Tokens committed.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    committed: tuple[int, ...]

    def cut(self, kept: int) -> RoundTrace:
        """The round without the tokens after a stop."""
        return replace(self, path=self.path[:kept], committed=self.committed[:kept])


@dataclass(frozen=True, kw_only=True)
class RequestUpdate:
    """What one step did for one request.

    Attributes:
        request_id: The request.
        new_token_ids: Tokens to deliver, in order.
        finish_reason: "stop", "length", "abort" or None while it runs.
        stop_reason: The stop token id, or None.
        drafted: Drafts verified.
        accepted: Drafts among the new tokens.
        trace: The round, when rounds are recorded.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | None = None
    drafted: int = 0
    accepted: int = 0
    trace: RoundTrace | None = None


@dataclass(frozen=True, kw_only=True)
class StartedRequest:
    """A request that takes a slot in this step; `state_blocks` are empty for a target without recurrent layers."""

    request_id: str
    req_idx: int
    token_ids: tuple[int, ...]
    temperature: float
    seed: int
    limit: int
    state_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeftRequest:
    """A request that left its slot since the last step."""

    request_id: str
    req_idx: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BlockUpdate:
    """New blocks of a request: `block_ids` take places `start ...` of its table row."""

    req_idx: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """One step as the scheduler hands it to the runner.

    Attributes:
        step: Number of the step.
        request_ids: Batch order.
        req_idx: Slot of each request.
        shape: Rows of each request.
        sampled: Whether each request is sampled rather than greedy.
        budget: Candidates that bounded this step's rows: the budget chosen with the step before.
        next_budget: Candidates the next round may verify.
        next_max_drafts: Drafts the next round can verify for each request, at most.
        started: Requests that take a slot now.
        left: Requests that left theirs.
        blocks: Blocks to append.
    """

    step: int
    request_ids: tuple[str, ...]
    req_idx: tuple[int, ...]
    shape: StepShape
    sampled: tuple[bool, ...]
    budget: int
    next_budget: int
    next_max_drafts: tuple[int, ...]
    started: tuple[StartedRequest, ...] = ()
    left: tuple[LeftRequest, ...] = ()
    blocks: tuple[BlockUpdate, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step's counts and tokens on the host, batch order."""

    committed: tuple[tuple[int, ...], ...]
    num_candidates: tuple[int, ...]
    traces: tuple[RoundTrace | None, ...] = field(default=())
