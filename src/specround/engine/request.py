"""`Request`: one request in the scheduler, with exact counts where they are known and bounds where they are not yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from specround.engine.messages import NewRequest


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request's host state.

    `num_tokens` counts tokens whose values are known here. Steps still in flight commit at least one and at most
    `in_flight[i]` tokens each, so the true count on the device lies between `min_tokens` and `max_tokens`.

    Attributes:
        new: The request as it came.
        token_ids: Prompt and delivered output.
        status: Where it is.
        req_idx: Slot while it runs, else -1.
        blocks: Blocks held, in order.
        state_blocks: Recurrent state blocks held, a span or none.
        prefill_end: Tokens to prefill: everything known when it was (re)started.
        num_prefilled: Tokens of it scheduled so far.
        in_flight: For each of its steps in flight that samples, the most tokens it may commit.
        num_draft_rows: Drafts that stand ready for its next round, at most.
    """

    new: NewRequest
    token_ids: list[int]
    status: Status = Status.WAITING
    req_idx: int = -1
    blocks: list[int] = field(default_factory=list)
    state_blocks: tuple[int, ...] = ()
    prefill_end: int = 0
    num_prefilled: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    num_draft_rows: int = 0

    @property
    def request_id(self) -> str:
        """The id."""
        return self.new.request_id

    @property
    def limit(self) -> int:
        """Most tokens, prompt and output."""
        return len(self.new.prompt_token_ids) + self.new.max_tokens

    @property
    def min_tokens(self) -> int:
        """Tokens it has at least once the steps in flight are done."""
        return len(self.token_ids) + len(self.in_flight)

    @property
    def max_tokens(self) -> int:
        """Tokens it has at most once the steps in flight are done."""
        return min(len(self.token_ids) + sum(self.in_flight), self.limit)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prefill is still to be scheduled."""
        return self.num_prefilled < self.prefill_end

    def start(self, req_idx: int) -> None:
        """Take a slot; everything known is prefilled again."""
        assert not self.in_flight, "a request restarts only when its former steps were taken in"
        self.status, self.req_idx = Status.RUNNING, req_idx
        self.prefill_end, self.num_prefilled, self.num_draft_rows = len(self.token_ids), 0, 0

    def leave(self, status: Status) -> None:
        """Give up the slot; blocks were returned by the scheduler."""
        self.status, self.req_idx, self.num_draft_rows = status, -1, 0
        self.blocks.clear()

    def deliver(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None, int | None]:
        """Append committed tokens up to the first stop condition.

        Returns:
            The tokens kept, the finish reason and the stop reason.
        """
        for kept, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            if token in self.new.eos_token_ids:
                return tokens[:kept], "stop", None
            if token in self.new.stop_token_ids:
                return tokens[:kept], "stop", token
            if len(self.token_ids) >= self.limit:
                return tokens[:kept], "length", None
        return tokens, None, None
