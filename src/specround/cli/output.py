"""What `specround generate` writes: texts or JSON lines in the order of the requests, drawn rounds, counts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console

from specround.cli.requests import CliRequest
from specround.engine import RequestOutput
from specround.inspector import DrawnRound, draw_round
from specround.models.tokenizer import Tokenizer

_UNWRAPPED = 100_000


class OutputWriter:
    """Writes each result as soon as those before it are written.

    Args:
        requests: All requests.
        stream: Where results go.
        as_json: JSON lines instead of text.
        drawing: Where rounds are drawn, or None.
        tokenizer: For the drawn tokens.
    """

    def __init__(
        self,
        requests: Sequence[CliRequest],
        stream: IO[str],
        *,
        as_json: bool,
        drawing: Console | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.num_failed = 0
        self._requests, self._stream, self._as_json = requests, stream, as_json
        self._drawing, self._tokenizer = drawing, tokenizer
        self._results: dict[int, RequestOutput | Exception] = {}
        self._next = 0
        self._held = False

    @contextmanager
    def held(self, hold: bool) -> Iterator[None]:
        """Keep results back meanwhile, where writing them would cut through a progress bar on the same terminal."""
        self._held = hold
        try:
            yield
        finally:
            self._held = False
            self._write_ready()

    def add(self, place: int, result: RequestOutput | Exception) -> None:
        """Take the result of the request at `place`: an output, or why there is none."""
        self._results[place] = result
        if not self._held:
            self._write_ready()

    def _write_ready(self) -> None:
        while self._next in self._results:
            self._write(self._requests[self._next], self._results.pop(self._next))
            self._next += 1
        self._stream.flush()

    def fail_rest(self, error: Exception) -> None:
        """Give every request without a result the error that ended the run."""
        for place in range(self._next, len(self._requests)):
            if place not in self._results:
                self.add(place, error)

    def _write(self, request: CliRequest, result: RequestOutput | Exception) -> None:
        error = result if isinstance(result, Exception) else result.error
        if error is not None:
            self.num_failed += 1
            self._write_error(request, error)
            return
        assert isinstance(result, RequestOutput)
        if self._drawing is not None:
            draw_rounds(self._drawing, result, self._tokenizer, f"request {request.id}, ")
        self._stream.write(self._json(request, result) if self._as_json else self._text(request, result))

    def _write_error(self, request: CliRequest, error: Exception) -> None:
        if self._as_json:
            self._stream.write(json_line({"id": request.id, "error": str(error)}, self._stream))
        sys.stderr.write(f"specround: error: request {request.id}: {' '.join(str(error).split())}\n")

    def _text(self, request: CliRequest, result: RequestOutput) -> str:
        heading = f"--- request {request.id} ---\n" if len(self._requests) > 1 else ""
        return f"{heading}{result.outputs[0].text}\n"

    def _json(self, request: CliRequest, result: RequestOutput) -> str:
        completion, metrics = result.outputs[0], result.metrics
        line = {
            "id": request.id,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_token_ids": list(result.prompt_token_ids),
            "metrics": {
                "rounds": metrics.rounds,
                "drafted": metrics.drafted,
                "accepted": metrics.accepted,
                "committed": metrics.committed,
            },
        }
        return json_line(line, self._stream)


def json_line(value: object, stream: IO[str]) -> str:
    """A value as a JSON line, with JSON's own escapes if the stream's encoding cannot express it.

    Args:
        value: What to write.
        stream: Where to; only its encoding is looked at.
    """
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(value)
    return line + "\n"


def colour_console(stream: IO[str] | None = None) -> Console:
    """A console on a stream (None = stdout) that styles only on a terminal, and never when NO_COLOR is set.

    Lines are wrapped only where a terminal would cut them.
    """
    stream = sys.stdout if stream is None else stream
    plain = bool(os.environ.get("NO_COLOR")) or not stream.isatty()
    width = None if stream.isatty() else _UNWRAPPED
    return Console(file=stream, color_system=None if plain else "auto", width=width, highlight=False)


def draw_rounds(
    console: Console,
    output: RequestOutput,
    tokenizer: Tokenizer | None,
    title: str = "",
    chosen: Sequence[int] | None = None,
) -> None:
    """Draw recorded rounds of a request.

    Args:
        console: Where to.
        output: From an engine with `record_rounds`.
        tokenizer: Spells tokens; None shows their ids.
        title: Goes before "round N".
        chosen: Numbers of the rounds, from 1; None = all.
    """
    for number, trace in enumerate(output.rounds, 1):
        if chosen is not None and number not in chosen:
            continue
        drawn = DrawnRound(
            tokens=[token_text(token, tokenizer) for token in trace.token_ids],
            parents=trace.parents,
            path=trace.path,
            bonus=token_text(trace.committed[-1], tokenizer),
        )
        console.print(draw_round(drawn, f"{title}round {number}"))


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """A token as the drawing shows it: its text quoted, the vocabulary's spelling for parts of a character.

    Example:
        >>> token_text(260, tokenizer)
        "' the'"
    """
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False)
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        return repr(text)
    spelling = tokenizer.convert_ids_to_tokens([token])[0]
    return f"<{token}>" if spelling is None else f"<{spelling}>"


def stats_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Counts of all requests in one line; the rate is of generated tokens, loading excluded."""
    rounds = sum(output.metrics.rounds for output in outputs)
    drafted = sum(output.metrics.drafted for output in outputs)
    accepted = sum(output.metrics.accepted for output in outputs)
    committed = sum(output.metrics.committed for output in outputs)
    return (
        f"rounds {rounds}, drafted {drafted}, accepted {accepted}, committed {committed}, "
        f"{committed / max(rounds, 1):.2f} tokens per round, {committed / max(seconds, 1e-9):.1f} tokens/s "
        f"({seconds:.2f} s)"
    )
