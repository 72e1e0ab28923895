"""From what a user passes to `generate` to the core's requests, with one clear error per bad request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specround.contract import RequestError
from specround.engine.messages import NewRequest
from specround.engine.sampling_params import SamplingParams
from specround.models.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        RequestError: Neither a string, nor a mapping, nor a list of them.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError("prompts", prompts, "a string, {'prompt_token_ids': [...]}, or a list of them")
    return list(prompts)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts.

    Raises:
        RequestError: A list of another length, or something else.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    whole = isinstance(params, (list, tuple)) and all(isinstance(item, SamplingParams) for item in params)
    if not whole or len(params) != count:
        raise RequestError("sampling_params", params, f"SamplingParams, or a list of {count} of them, one per prompt")
    return list(params)


class InputProcessor:
    """Tokenises and checks requests.

    Args:
        tokenizer: The model's tokenizer, or None: then prompts are token ids.
        vocab_size: Ids must be below it.
        max_model_len: Longest request, prompt and output.
        eos_token_ids: The model's end-of-sequence ids.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)

    def tokenise(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        """The prompt's text, if it had one, and its tokens.

        Raises:
            RequestError: Malformed, empty, out of the vocabulary, or too long.
        """
        text, ids = self._read(prompt)
        if not ids:
            raise RequestError("prompt", prompt, "at least one token")
        if len(ids) >= self._max_model_len:
            allowed = f"at most {self._max_model_len - 1}: max_model_len={self._max_model_len} less one generated token"
            raise RequestError("prompt length", len(ids), allowed)
        return text, ids

    def build(self, request_id: str, ids: tuple[int, ...], params: SamplingParams, seed: int) -> NewRequest:
        """The core's request.

        Args:
            request_id: Its id.
            ids: Its prompt.
            params: How it is sampled.
            seed: Used when the parameters bring none.

        Raises:
            RequestError: Parameters that do not fit this model.
        """
        if params.stop and self._tokenizer is None:
            raise RequestError("stop", params.stop, "None: this model has no tokenizer")
        stop_ids = params.stop_token_ids or ()
        for token in stop_ids:
            if token >= self._vocab_size:
                raise RequestError("stop_token_ids", token, f"below {self._vocab_size}")
        room = self._max_model_len - len(ids)
        return NewRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            temperature=0.0 if params.greedy else float(params.temperature),
            seed=(params.seed if params.seed is not None else seed) % 2**64,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=frozenset(stop_ids),
            eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
        )

    def _read(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids", "messages"} & prompt.keys()
            if len(known) != 1 or len(prompt) != 1:
                allowed = "a mapping with exactly one of 'prompt', 'prompt_token_ids' and 'messages'"
                raise RequestError("prompt", dict(prompt), allowed)
            if "prompt_token_ids" in prompt:
                return None, self._check_ids(prompt["prompt_token_ids"])
            if "messages" in prompt:
                if self._tokenizer is None:
                    raise RequestError("messages", prompt["messages"], "token ids: this model has no tokenizer")
                return None, self._check_ids(list(self._tokenizer.apply_chat_template(prompt["messages"])))
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise RequestError("prompt", prompt, "a string or {'prompt_token_ids': [...]}")
        if self._tokenizer is None:
            raise RequestError("prompt", prompt, "token ids: this model has no tokenizer")
        return prompt, self._check_ids(self._tokenizer.encode(prompt))

    def _check_ids(self, ids: object) -> tuple[int, ...]:
        if not isinstance(ids, (list, tuple)):
            raise RequestError("prompt_token_ids", ids, "a list of token ids")
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise RequestError("prompt_token_ids", token, f"integers of 0 to {self._vocab_size - 1}")
        return tuple(ids)
