"""`ngram`: prompt lookup, a chain copied from the last place where the newest tokens stood before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specround.contract import BaseSpeculator, ConfigError, SpecResources, SpeculatorConfig, register_speculator

if TYPE_CHECKING:
    from specround.contract import DraftHost, ProposeView


@register_speculator("ngram")
@dataclass(frozen=True, kw_only=True)
class NgramConfig(SpeculatorConfig):
    """Prompt lookup: no draft model and no training; good where outputs repeat their input (edits, extraction, RAG).

    Source: Saxena, "Prompt Lookup Decoding", 2023.

    Attributes:
        prompt_lookup_max: Longest n-gram looked up, in tokens, >= `prompt_lookup_min`.
        prompt_lookup_min: Shortest n-gram looked up, in tokens, >= 1.

    Raises:
        ConfigError: A field is out of range.

    Example:
        >>> NgramConfig(num_speculative_tokens=4, prompt_lookup_max=3).declare_resources().max_candidates
        5
    """

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if type(shortest) is not int or shortest < 1:
            raise ConfigError("prompt_lookup_min", shortest, "an integer >= 1")
        if type(longest) is not int or longest < shortest:
            raise ConfigError("prompt_lookup_max", longest, f"an integer >= prompt_lookup_min = {shortest}")

    def declare_resources(self) -> SpecResources:
        """A chain of K drafts that is drafted on the host."""
        return SpecResources(max_candidates=self.num_speculative_tokens + 1, drafting="host")

    def create(self, resources: SpecResources, host: DraftHost, device: torch.device) -> NgramSpeculator:
        """Build the speculator; it needs nothing of the host and keeps nothing on the device."""
        return NgramSpeculator(self)


class NgramHistory:
    """One request's tokens and, for each n-gram in them, where it was continued last.

    Appending a token costs one dictionary entry per n-gram length, a lookup one access per length: neither depends on
    how long the request is.

    Args:
        shortest: Shortest n-gram, >= 1.
        longest: Longest n-gram, >= `shortest`.

    Example:
        >>> history = NgramHistory(shortest=1, longest=3)
        >>> history.extend([5, 6, 7, 8, 5, 6])
        >>> history.draft(limit=3)
        [7, 8, 5]
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._continued_at: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; every n-gram that ends right before one of them is now continued by it."""
        history = self._tokens
        for token in tokens:
            size = len(history)
            for length in self._lengths:
                if length > size:
                    break
                self._continued_at[tuple(history[size - length :])] = size
            history.append(token)

    def draft(self, limit: int) -> list[int]:
        """Continue the longest n-gram at the end of the history as its most recent earlier occurrence went on.

        A copy that reaches the end of the history goes on with what it has copied, so a loop is drafted to any length.

        Args:
            limit: Most tokens wanted.

        Returns:
            `limit` tokens, or none when no n-gram occurred earlier.
        """
        history = self._tokens
        for length in reversed(self._lengths):
            if limit < 1 or length > len(history):
                continue
            start = self._continued_at.get(tuple(history[-length:]))
            if start is not None:
                period = len(history) - start
                return [history[start + offset % period] for offset in range(limit)]
        return []


class NgramSpeculator(BaseSpeculator):
    """Drafts chains into the engine's draft buffer; plan and acceptance are the built-in ones.

    Args:
        config: Lengths of the n-grams, and K.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._max_drafts = config.num_speculative_tokens
        self._histories: dict[str, NgramHistory] = {}

    def bind_resources(self, effective: SpecResources) -> None:
        """Draft at most what the effective resources verify."""
        self._max_drafts = effective.max_candidates - 1

    def request_started(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Index the prompt, and what was generated before a preemption."""
        history = NgramHistory(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        history.extend(token_ids)
        self._histories[request_id] = history

    def request_finished(self, request_id: str, req_idx: int, token_ids: Sequence[int]) -> None:
        """Forget the request."""
        self._histories.pop(request_id, None)

    def propose(self, view: ProposeView) -> Sequence[int]:
        """Follow the committed tokens and write a row of drafts, padded with -1, for every request of the step."""
        return self._follow(view, min(self._max_drafts, view.budget - 1))

    def absorb(self, view: ProposeView) -> None:
        """Follow the committed tokens and leave every row of the step empty."""
        self._follow(view, 0)

    def _follow(self, view: ProposeView, max_drafts: int) -> list[int]:
        step, buffer = view.host, view.draft_token_ids
        assert step is not None, "a host drafter is given HostStep"
        rows = np.full((len(step.request_ids), buffer.shape[1]), -1, dtype=np.int64)
        per_request = zip(step.request_ids, step.committed, step.max_drafts, strict=True)
        for row, (request_id, committed, allowed) in zip(rows, per_request, strict=True):
            if committed:
                history = self._histories[request_id]
                history.extend(committed)
                drafts = history.draft(min(max_drafts, allowed, len(row)))
                row[: len(drafts)] = drafts
        slots = torch.tensor(step.req_idx, dtype=torch.int64).to(buffer.device, non_blocking=True)
        buffer.index_copy_(0, slots, torch.from_numpy(rows).to(buffer.device, non_blocking=True))
        counts: list[int] = (rows >= 0).sum(1).tolist()
        return counts
