"""`SamplingParams`: shaped like vLLM's; what is not supported yet is refused, never ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from specround.contract import RequestError

_NOT_YET: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "bad_words": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
}
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
_MAX_TEMPERATURE = 1e6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    r"""How one request is sampled and when it stops.

    Attributes:
        temperature: 0 to 1e6; 0 (below 1e-5) = greedy.
        seed: Makes sampling reproducible: the text depends on prompt, parameters and seed, never on speculation, batch
            or budget. None = the engine draws one. Taken mod 2^64.
        max_tokens: Most tokens to generate, >= 1; None = up to the context limit.
        stop: Strings that end the text; they are not part of it unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end the text, besides the model's end-of-sequence ids.
        ignore_eos: Do not stop at the model's end-of-sequence ids.
        include_stop_str_in_output: Keep the stop string in the text.
        detokenize: Produce text; False leaves it empty and refuses `stop`.
        skip_special_tokens: Leave special tokens out of the text.
        n: Other values than 1 are not supported yet, nor are other values than the default of `presence_penalty`,
            `frequency_penalty`, `repetition_penalty`, `top_p`, `top_k`, `min_p`, `bad_words`, `min_tokens`,
            `logprobs`, `prompt_logprobs`, `logit_bias`, `allowed_token_ids` and `structured_outputs`.

    Raises:
        RequestError: A value is out of range or not supported yet.

    Example:
        >>> SamplingParams(temperature=0.8, seed=7, max_tokens=64, stop=["\n\n"])
    """

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: Any = field(default=None)

    def __post_init__(self) -> None:
        for name, default in _NOT_YET.items():
            value = getattr(self, name)
            if not _is_neutral(name, value):
                raise RequestError(name, value, f"{default!r}: other values are not supported yet")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature <= _MAX_TEMPERATURE:  # not true of NaN
            raise RequestError("temperature", self.temperature, f"a number from 0 to {_MAX_TEMPERATURE:.0f}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "True or False")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise RequestError("seed", self.seed, "an integer or None")
        tokens = self.max_tokens
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise RequestError("max_tokens", tokens, "an integer >= 1 or None")
        self._check_stops()

    def _check_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop if self.stop is not None else []
        if not isinstance(stop, (list, tuple)) or any(not isinstance(text, str) or not text for text in stop):
            raise RequestError("stop", self.stop, "a non-empty string or a list of them")
        if stop and not self.detokenize:
            raise RequestError("stop", self.stop, "None when detokenize is False: stop strings are found in the text")
        ids = self.stop_token_ids if self.stop_token_ids is not None else []
        whole = isinstance(ids, (list, tuple)) and all(type(token) is int and token >= 0 for token in ids)
        if not whole:
            raise RequestError("stop_token_ids", self.stop_token_ids, "a list of token ids >= 0")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def greedy(self) -> bool:
        """Whether the temperature counts as 0."""
        return self.temperature < 1e-5


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a value asks for nothing. Compares numbers only: arrays and the like have no single answer."""
    if _NOT_YET[name] is None:
        return value is None or (isinstance(value, list) and not value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(value == _NOT_YET[name]) or (name == "top_k" and value == -1)
