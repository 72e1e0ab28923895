"""What `specround generate` is asked for: prompts and JSON lines as requests, each with its own error if it is bad."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from specround.cli.parser import UsageError
from specround.contract import RequestError
from specround.engine import SamplingParams
from specround.models.tokenizer import Tokenizer

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(kw_only=True)
class CliRequest:
    """One request of the command line or of a JSON line.

    Attributes:
        id: What the output calls it: the line's "id", else its number from 0, or the next one that no line has.
        body: One of "prompt", "prompt_token_ids" and "messages" with its value.
        params: How it is sampled.
        error: Why it is refused, or None.
    """

    id: str | int
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    error: RequestError | None = None

    def engine_prompt(self, tokenizer: Tokenizer | None, *, chat: bool) -> str | dict[str, Any]:
        """The prompt as `LLM.generate` takes it.

        Args:
            tokenizer: The model's tokenizer, or None.
            chat: Make a text prompt the user's message of a conversation.

        Raises:
            RequestError: The model has no tokenizer or chat template, or the messages are malformed.
        """
        messages = self.body.get("messages")
        if chat and "prompt" in self.body:
            messages = [{"role": "user", "content": self.body["prompt"]}]
        if messages is None:
            return self.body["prompt"] if "prompt" in self.body else dict(self.body)
        if tokenizer is None:
            raise RequestError("messages", messages, "absent: this model has no tokenizer")
        if not isinstance(messages, list):
            raise RequestError("messages", messages, 'a list of {"role": ..., "content": ...}')
        return {"prompt_token_ids": tokenizer.apply_chat_template(messages)}


def requests_of_prompts(prompts: Sequence[str], params: SamplingParams) -> list[CliRequest]:
    """One request for each `--prompt`."""
    return [CliRequest(id=number, body={"prompt": text}, params=params) for number, text in enumerate(prompts)]


def requests_of_file(name: str, params: SamplingParams) -> list[CliRequest]:
    """One request for each JSON line of a file, `-` = stdin. Empty lines are skipped.

    Args:
        name: The file.
        params: Sampling parameters that a line's own fields replace.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        if name == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                content = file.read()
    except OSError as error:
        raise UsageError(f"argument --prompts: cannot read {name!r} ({error.strerror})") from error
    return requests_of_lines(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), params)


def requests_of_lines(lines: Iterable[bytes], params: SamplingParams) -> list[CliRequest]:
    """Requests of JSON lines; a bad line becomes a request that carries its error.

    Example:
        >>> requests_of_lines([b'{"prompt": "a", "max_tokens": 4}'], SamplingParams())[0].params.max_tokens
        4
    """
    parsed = [_parsed(line) for line in lines if line.strip()]
    given = {fields["id"] for fields in parsed if isinstance(fields, dict) and _is_id(fields.get("id"))}
    taken: set[str | int] = set()
    return [_request(number, fields, given, taken, params) for number, fields in enumerate(parsed)]


def _parsed(line: bytes) -> dict[str, Any] | RequestError:
    try:
        fields = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return RequestError("line", line.decode("utf-8", "replace").strip(), f"a JSON object ({error})")
    return fields if isinstance(fields, dict) else RequestError("line", fields, "a JSON object")


def _request(
    number: int,
    fields: dict[str, Any] | RequestError,
    given: set[str | int],
    taken: set[str | int],
    params: SamplingParams,
) -> CliRequest:
    """The request of a line; `taken` are the ids of the lines before it, `given` those that any line brings."""
    request = CliRequest(id=next(free for free in itertools.count(number) if free not in given and free not in taken))
    try:
        if isinstance(fields, RequestError):
            raise fields
        request.id = _id(fields.pop("id", None), request.id, taken)
        request.body, request.params = _body(fields), _params(fields, params)
    except RequestError as error:
        request.error = error
    taken.add(request.id)
    return request


def _is_id(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _id(given: object, number: str | int, taken: set[str | int]) -> str | int:
    if given is None:
        return number
    if not isinstance(given, (str, int)) or not _is_id(given):
        raise RequestError("id", given, "a string or an integer")
    if given in taken:
        raise RequestError("id", given, "unique in the batch")
    return given


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    body = {name: fields.pop(name) for name in _PROMPT_FIELDS if name in fields}
    if len(body) != 1:
        raise RequestError("prompt", sorted(body), "exactly one of 'prompt', 'prompt_token_ids' and 'messages'")
    return body


def _params(fields: dict[str, Any], params: SamplingParams) -> SamplingParams:
    for name, value in fields.items():
        if name not in _SAMPLING_FIELDS:
            allowed = f"'id', one of {', '.join(_PROMPT_FIELDS)}, or a field of SamplingParams"
            raise RequestError(name, value, f"a known field: {allowed}")
    return dataclasses.replace(params, **fields) if fields else params
