"""What is compared: plain decoding, speculators and peers, each of which runs a batch of prompts greedily."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specround.engine import LLM, RequestOutput, SamplingParams

Role = Literal["plain", "speculator", "peer_plain", "peer"]
TokenIds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one batch.

    Attributes:
        token_ids: What was generated for each prompt.
        seconds: Wall time, prefill included.
        decode_seconds: Wall time after every prompt had its first token.
        decode_tokens: Tokens that came in that time.
        rounds: Rounds (target forwards, for a peer) summed over the prompts.
        drafted: Drafts verified; None where it is not known.
        accepted: Drafts kept; None where it is not known.
    """

    token_ids: tuple[TokenIds, ...]
    seconds: float
    decode_seconds: float
    decode_tokens: int
    rounds: int
    drafted: int | None = None
    accepted: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(tokens) for tokens in self.token_ids)


class Variant(Protocol):
    """One way to generate."""

    @property
    def name(self) -> str:
        """Unique in a benchmark."""
        ...

    @property
    def role(self) -> Role:
        """What it is compared as."""
        ...

    def run(self, prompts: Sequence[TokenIds]) -> Run:
        """Generate for some prompts at once."""
        ...


class EngineVariant:
    """The embedded engine, with a speculator or without.

    Args:
        name: Unique in a benchmark.
        llm: The engine.
        max_tokens: Tokens per prompt, at most.
        ignore_eos: Generate `max_tokens` tokens whatever they are.
    """

    def __init__(self, name: str, llm: LLM, *, max_tokens: int, ignore_eos: bool) -> None:
        self.name, self.llm = name, llm
        self.role: Role = "plain" if llm.config.speculative_config is None else "speculator"
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def run(self, prompts: Sequence[TokenIds]) -> Run:
        """Generate for some prompts at once.

        Raises:
            RequestError: A prompt does not fit the model.
        """
        waiting = {str(place) for place in range(len(prompts))}
        total = before_decode = 0
        decode_started = 0.0

        def on_update(output: RequestOutput, new_tokens: int) -> None:
            nonlocal total, before_decode, decode_started
            total += new_tokens
            if waiting and new_tokens:
                waiting.discard(output.request_id)
                before_decode, decode_started = total, time.perf_counter()

        started = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            self._params,
            request_ids=sorted(waiting, key=int),
            on_update=on_update,
        )
        ended = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return Run(
            token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
            seconds=ended - started,
            decode_seconds=ended - decode_started,
            decode_tokens=total - before_decode,
            rounds=sum(output.metrics.rounds for output in outputs),
            drafted=sum(output.metrics.drafted for output in outputs),
            accepted=sum(output.metrics.accepted for output in outputs),
        )
