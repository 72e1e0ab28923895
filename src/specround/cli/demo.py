"""`specround demo`: the same prompts with and without speculation, side by side."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specround.cli.progress import Report
    from specround.engine import LLM, RequestOutput

_DESCRIPTION = """\
Generate the same three texts without speculation and with the suffix_tree speculator, compare them token by token, and
draw some of the rounds. The exit code is 1 if the texts differ.
"""
_COPY = """\
[{"name": "Anna", "city": "Paris", "age": 31}, {"name": "Ben", "city": "Berlin", "age": 27}, \
{"name": "Clara", "city": "Vienna", "age": 45}, {"name": "David", "city": "Rome", "age": 38}]
The same list, one record per line:
{"name": "Anna", "city": "Paris", "age": 31}
{"name": "Ben","""
_CODE = """\
def area(shape):
    if shape.kind == "square":
        return shape.width * shape.width
    if shape.kind == "rectangle":
        return shape.width * shape.height
    raise ValueError(shape.kind)

def perimeter(shape):
    if shape.kind == "square":
        return 4 * shape.width
    if shape.kind == "rectangle":
        return 2 * shape.width + 2 * shape.height
    raise ValueError(shape.kind)

def diagonal(shape):
    if shape.kind == "square":"""
_CHAT = "What is a tree in computer science? Answer in three short sentences."
_NUM_DRAFTS = 8
_NUM_DRAWN = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One prompt's output and how long it took."""

    output: RequestOutput
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.output.outputs[0].token_ids) / self.seconds

    @property
    def per_round(self) -> float:
        """Tokens per round."""
        return self.output.metrics.committed / self.output.metrics.rounds


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo", help="compare plain decoding and suffix_tree", description=_DESCRIPTION
    )
    parser.add_argument("--model", default="smollm2", help="alias, directory, .gguf file or hub id (default: smollm2)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens per prompt (default: 48)")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bars on stderr (default: on a terminal)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure both ways, print the comparison, draw rounds."""
    from specround.cli.output import colour_console, draw_rounds
    from specround.cli.parser import UsageError
    from specround.cli.progress import load_bar, wants_progress

    if arguments.max_tokens < 1:
        raise UsageError(f"argument --max-tokens: {arguments.max_tokens}: must be an integer >= 1")
    speculation = {"method": "suffix_tree", "num_speculative_tokens": _NUM_DRAFTS}
    sys.stdout.write(f"{arguments.model}, greedy, float32; speculator: {speculation}\n")
    sys.stdout.flush()
    engines = []
    for config in (None, speculation):
        with load_bar(wants_progress(arguments.progress)) as report:
            engines.append(_load(arguments.model, config, report))
    measured = _measure(engines[0], engines[1], arguments.max_tokens)
    same = True
    for name, (before, after) in measured.items():
        equal = before.output.outputs[0].token_ids == after.output.outputs[0].token_ids
        same &= equal
        sys.stdout.write(_comparison(name, before, after, equal))
    console = colour_console()
    for name, (_, after) in measured.items():
        sys.stdout.write(f"\nsome rounds of the {name} prompt:\n")
        draw_rounds(console, after.output, engines[1].tokenizer, chosen=_most_instructive(after.output))
    if not same:
        sys.stderr.write("specround: error: the texts differ\n")
    return 0 if same else 1


def _load(model: str, config: dict[str, Any] | None, report: Report | None) -> LLM:
    from specround.engine import LLM

    return LLM(model, config, on_load=report, dtype="float32", max_num_seqs=1, record_rounds=True)


def _measure(plain: LLM, speculated: LLM, max_tokens: int) -> dict[str, tuple[Measured, Measured]]:
    """Generate each text on both engines, warm, one right after the other so that both meet the same load."""
    from specround.engine import SamplingParams

    for llm in (plain, speculated):
        llm.generate("1 2 1 2 1 2", SamplingParams(temperature=0, max_tokens=4))
    chat: Any = _CHAT
    if plain.tokenizer is not None and plain.tokenizer.chat_template is not None:
        chat = {"prompt_token_ids": plain.tokenizer.apply_chat_template([{"role": "user", "content": _CHAT}])}
    prompts = {"copying": _COPY, "code": _CODE, "chat": chat}
    return {
        name: (_timed(plain, prompt, max_tokens), _timed(speculated, prompt, max_tokens))
        for name, prompt in prompts.items()
    }


def _timed(llm: LLM, prompt: Any, max_tokens: int) -> Measured:
    from specround.engine import SamplingParams

    started = time.perf_counter()
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0]
    return Measured(output=output, seconds=time.perf_counter() - started)


def _comparison(name: str, plain: Measured, speculated: Measured, equal: bool) -> str:
    return (
        f"\n{name} prompt: {speculated.output.outputs[0].text.strip()!r}\n"
        f"  texts {'identical' if equal else 'DIFFERENT'} ({len(plain.output.outputs[0].token_ids)} tokens)\n"
        f"  plain        {plain.rate:6.1f} tokens/s  {plain.per_round:.2f} tokens per round\n"
        f"  suffix_tree  {speculated.rate:6.1f} tokens/s  {speculated.per_round:.2f} tokens per round"
        f"  ({speculated.rate / plain.rate:.2f} times plain)\n"
    )


def _most_instructive(output: RequestOutput) -> list[int]:
    """Numbers of the rounds with the longest paths, those of trees that branch first."""

    def interest(number: int) -> tuple[bool, int]:
        trace = output.rounds[number - 1]
        return len(set(trace.parents)) < len(trace.parents), len(trace.path)

    return sorted(sorted(range(1, len(output.rounds) + 1), key=interest, reverse=True)[:_NUM_DRAWN])
