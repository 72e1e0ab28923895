"""What `generate` returns, shaped like vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specround.contract import RequestError
from specround.engine.messages import RoundTrace


@dataclass(kw_only=True)
class RequestMetrics:
    """Counts of one request.

    Attributes:
        rounds: Rounds that committed tokens for it; the first is the end of its prefill.
        drafted: Drafts verified.
        accepted: Drafts kept.
        committed: Tokens kept, equal to the tokens delivered.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion.

    Attributes:
        index: Which of the request's completions.
        text: Detokenised text.
        token_ids: Generated tokens, a stop token included.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: The stop string or stop token id that ended it; None for end of sequence and length.
        logprobs: Not supported yet: None.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: None = None


@dataclass(kw_only=True)
class RequestOutput:
    """A request and what came of it.

    Attributes:
        request_id: Its id.
        prompt: The prompt's text, None when it came as token ids.
        prompt_token_ids: The prompt.
        outputs: Its completions, one for now.
        finished: Whether it is done.
        metrics: Its counts.
        rounds: Its rounds, when the engine records them.
        error: Why it was refused, or None. A refused request in a batch fails alone.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    rounds: list[RoundTrace] = field(default_factory=list)
    error: RequestError | None = None

    def snapshot(self) -> RequestOutput:
        """A copy that later tokens do not change."""
        outputs = [replace(output, token_ids=list(output.token_ids)) for output in self.outputs]
        return replace(self, outputs=outputs, metrics=replace(self.metrics), rounds=list(self.rounds))
