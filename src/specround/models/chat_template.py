"""Render chat templates: Jinja in an immutable sandbox, with the variables and functions templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specround.contract.errors import RequestError


class ChatTemplate:
    """One chat template; it is compiled when it is first used, so that a broken one fails only chat requests.

    Args:
        source: Jinja source, as checkpoints carry it. It runs in a sandbox and sees only the variables given to it.
        variables: What every rendering sees besides the messages: special tokens such as `bos_token`.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
        >>> template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        '<user>hi'
    """

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
            messages: Mappings with at least a string "role"; usually also "content".
            add_generation_prompt: End with the opening of an assistant turn.
            variables: More variables for the template, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: A message is malformed, or the template is broken or refuses the conversation.
        """
        if not messages:
            raise RequestError("messages", messages, "a list of at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{index}]", message, 'a mapping with a string "role"')
        context: dict[str, object] = {"tools": None, "documents": None} | self._variables | dict(variables or {})
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(context)
        except Exception as error:  # a template can raise anything: Jinja's errors, TypeError on None content, ...
            reason = f"{type(error).__name__}: {error}"
            raise RequestError("messages", list(messages), f"accepted by the chat template ({reason})") from error


class _GenerationTag(Extension):
    """`{% generation %}`, which marks assistant text for training: its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja reads

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
