"""`Detokenizer`: text from tokens as they come, and stop strings found token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_CONTEXT = 6
"""Prompt tokens that precede the output when it is decoded, because some tokenizers decode by neighbour."""


class Decoder(Protocol):
    """The part of a tokenizer that detokenisation needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of some tokens."""
        ...


class Detokenizer:
    """Incremental detokenisation of one request.

    A token that ends inside a character waits until the character is whole.

    Args:
        decoder: The tokenizer.
        prompt_token_ids: The prompt.
        stop: Stop strings.
        include_stop: Keep the stop string in the text.
        skip_special_tokens: Leave special tokens out.

    Example:
        >>> detokenizer.feed(260), detokenizer.text
        (None, ' the')
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.text = ""
        self._decoder, self._stop, self._include_stop = decoder, tuple(stop), include_stop
        self._skip_special_tokens = skip_special_tokens
        self._pending = list(prompt_token_ids[-_CONTEXT:])
        self._read = len(self._pending)

    @property
    def settled_text(self) -> str:
        """The text that no stop string to come can take back."""
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if stop.startswith(self.text[-length:]):
                    held = length
                    break
        return self.text[: len(self.text) - held]

    def feed(self, token_id: int) -> str | None:
        """Take one token; the stop string it completed, if any."""
        self._pending.append(token_id)
        whole = self._decode(self._pending)
        if whole.endswith("\N{REPLACEMENT CHARACTER}"):
            return None
        return self._extend(whole)

    def finish(self) -> str | None:
        """Take what still waits for the rest of a character; the stop string it completed, if any."""
        return self._extend(self._decode(self._pending)) if self._read < len(self._pending) else None

    def _extend(self, whole: str) -> str | None:
        known = self._decode(self._pending[: self._read])
        added = whole[len(known) :]
        self._pending = self._pending[self._read :] if self._read < len(self._pending) else self._pending
        self._read = len(self._pending)
        start = len(self.text)
        self.text += added
        return self._cut_at_stop(start)

    def _cut_at_stop(self, start: int) -> str | None:
        found = [
            (place, stop) for stop in self._stop if (place := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        place, stop = min(found, key=lambda item: (item[0], -len(item[1])))
        self.text = self.text[: place + len(stop) if self._include_stop else place]
        return stop

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)
