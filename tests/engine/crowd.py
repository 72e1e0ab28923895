"""Requests that join, leave and come back at random while an engine core runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from plain_reference import Ask, PlainReference, Tally, check_at_rest

from specround import LLM
from specround.engine.messages import NewRequest, RequestUpdate


def new_request(request_id: str, ask: Ask) -> NewRequest:
    """The core's form of a request."""
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=ask.prompt,
        temperature=ask.temperature,
        seed=ask.seed,
        max_tokens=ask.max_tokens,
    )


@dataclass
class Visit:
    """One stay of a request; an id can stay again under another request once the first stay was aborted."""

    request_id: str
    ask: Ask
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Crowd:
    """Drives a core and remembers who got which tokens.

    Args:
        llm: Fresh engine.
        asks: Requests in the order they join.
        seed: Of the random choices.
        abort_share: Probability that a step is followed by an abort.
    """

    def __init__(self, llm: LLM, asks: Sequence[Ask], seed: int, abort_share: float) -> None:
        self.llm, self.core, self.random = llm, llm.engine.core, random.Random(seed)
        self.queue, self.abort_share = list(asks), abort_share
        self.visits: list[Visit] = []
        self.here: dict[str, Visit] = {}
        self.aborted_in: dict[str, int] = {"waiting": 0, "prefill": 0, "decode": 0, "in flight": 0}
        self.returned = 0

    def run(self) -> None:
        """Until everyone left."""
        while self.queue or self.core.has_work:
            for _ in range(self.random.choice((0, 0, 1, 2))):
                if self.queue:
                    self._join(str(len(self.visits)))
            self._take(self.core.step())
            if self.here and self.random.random() < self.abort_share:
                self._abort(self.random.choice(sorted(self.here)))

    def check(self, reference: PlainReference) -> Tally:
        """Everyone got the tokens of plain decoding, or the first of them when aborted; the engine is empty."""
        tally = Tally()
        assert not self.here
        for visit in self.visits:
            assert visit.finish_reason in ("length", "abort")
            reference.compare(visit.ask, visit.tokens, tally, whole=visit.finish_reason == "length")
        check_at_rest(self.llm)
        tally.check()
        return tally

    def _join(self, request_id: str) -> None:
        visit = Visit(request_id, self.queue.pop(0))
        self.core.add(new_request(request_id, visit.ask))
        self.visits.append(visit)
        self.here[request_id] = visit

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            visit = self.here[update.request_id]
            visit.tokens += update.new_token_ids
            visit.finish_reason = update.finish_reason
            if update.finish_reason is not None:
                del self.here[update.request_id]

    def _abort(self, request_id: str) -> None:
        request = self.core.scheduler._requests[request_id]
        if request in self.core.scheduler.waiting:
            phase = "waiting"
        elif request.is_prefilling:
            phase = "prefill"
        else:
            phase = "in flight" if request.in_flight else "decode"
        self.aborted_in[phase] += 1
        self._take(self.core.abort([request_id, "nobody"]))
        if self.queue and self.random.random() < 0.5:
            self._join(request_id)  # the id comes back at once, maybe while its old step is still under way
            self.returned += 1
