"""`specround generate`: prompts or JSON lines in, text or JSON lines out."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from specround.cli.parser import UsageError, json_object

if TYPE_CHECKING:
    from specround.cli.output import OutputWriter
    from specround.cli.requests import CliRequest
    from specround.engine import LLM, RequestOutput, SamplingParams

_DESCRIPTION = """\
Generate text. With --speculative-config a speculator drafts; what is generated does not depend on it.

examples:
  specround generate --prompt "The capital of France is"
  specround generate --chat --prompt "Name three rivers." --max-tokens 100 --stats
  specround generate --prompt "1 2 3 1 2 3 1 2" --show-rounds \\
      --speculative-config '{"method": "suffix_tree", "num_speculative_tokens": 12}'
  specround generate --prompts requests.jsonl --output results.jsonl --temperature 0.8 --seed 7
"""
_EPILOG = """\
a line of --prompts is a JSON object with exactly one of
  "prompt": "text"   "prompt_token_ids": [1, 2]   "messages": [{"role": "user", "content": "text"}]
and, if you like, "id" and fields that replace the sampling flags ("temperature", "seed", "max_tokens", "stop",
"stop_token_ids", "ignore_eos", ...). A result line has "id", "text", "token_ids", "finish_reason", "stop_reason",
"prompt_token_ids" and "metrics"; a request that is refused fails alone, has "id" and "error", and makes the exit
code 1. Results keep the order of the requests.

--speculative-config takes {"method": NAME, "num_speculative_tokens": K, ...}; `specround models` lists methods and
their fields. A method can also be a class: "module:Class" is found in installed packages and the working directory.

--show-rounds draws on stdout; on stderr when JSON lines go to stdout. Colour is off when that is no terminal or
NO_COLOR is set.
"""
_ENGINE_SETTINGS = {
    "dtype": "dtype",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "num_blocks": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "state_mode": "state_mode",
    "num_state_blocks": "num_state_blocks",
    "engine_seed": "seed",
    "device": "device",
    "async_scheduling": "async_scheduling",
}  # argument -> setting of EngineConfig; arguments that are not given leave the setting's own default


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate", help="generate text", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--model", default="smollm2", help="alias, directory, .gguf file or hub id (default: smollm2)")
    parser.add_argument("--speculative-config", type=json_object, metavar="JSON", help="the speculator and its fields")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeat it for several")
    source.add_argument("--prompts", metavar="FILE", help="JSON lines, - = stdin")
    parser.add_argument("--chat", action="store_true", help="make each prompt a user's message (chat template)")
    _add_output(parser.add_argument_group("output"))
    _add_sampling(parser.add_argument_group("sampling, for requests that bring no values of their own"))
    _add_engine(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)
    return parser


def _add_output(group: Any) -> None:
    group.add_argument("--output", default="-", metavar="FILE", help="where results go, - = stdout (default)")
    group.add_argument("--format", choices=("text", "jsonl"), help="default: jsonl with --prompts, else text")
    group.add_argument("--show-rounds", action="store_true", help="draw each round's tree and the path it kept")
    group.add_argument("--stats", action="store_true", help="counts and tokens per second on stderr")
    switch = argparse.BooleanOptionalAction
    group.add_argument("--progress", action=switch, help="progress bars on stderr (default: on a terminal)")


def _add_sampling(group: Any) -> None:
    group.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    group.add_argument("--seed", type=int, help="makes sampling reproducible")
    group.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate (default: 64)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="a string that ends the text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def _add_engine(group: Any) -> None:
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16 (auto: float32 on a CPU)")
    group.add_argument("--quantization", help="int8, int4 or w8a8, on a CPU")
    group.add_argument("--max-model-len", type=int, help="longest request, prompt and output, in tokens")
    group.add_argument("--max-num-seqs", type=int, help="most requests at once (default: 16)")
    group.add_argument("--max-num-batched-tokens", type=int, help="most rows of a step (default: 512)")
    group.add_argument("--block-size", type=int, help="tokens per KV block (default: 16)")
    group.add_argument("--num-blocks", type=int, help="KV blocks")
    group.add_argument("--kv-cache-memory-bytes", type=int, help="memory of the KV blocks, instead of --num-blocks")
    group.add_argument("--state-mode", help="replay or slots: how recurrent layers keep drafts (default: replay)")
    group.add_argument("--num-state-blocks", type=int, help="blocks of recurrent states")
    group.add_argument("--engine-seed", type=int, help="seeds requests without a seed (default: 0)")
    group.add_argument("--device", help="auto, cpu or cuda")
    switch = argparse.BooleanOptionalAction
    group.add_argument("--async-scheduling", action=switch, help="take in results one step late (default: on a GPU)")


def run(arguments: argparse.Namespace) -> int:
    """Generate; 1 when a request failed."""
    as_json = (arguments.format or ("jsonl" if arguments.prompts is not None else "text")) == "jsonl"
    _check_output(arguments.output, arguments.prompts)
    _check_speculator(arguments.speculative_config)
    requests = _read_requests(arguments, _sampling_params(arguments))
    if not requests:
        return 0
    llm = _load(arguments)
    with _open_output(arguments.output) as stream:
        writer = _writer(requests, llm, stream, arguments, as_json)
        started = time.perf_counter()
        outputs = _generate(llm, requests, writer, arguments)
        seconds = time.perf_counter() - started
    if arguments.stats:
        from specround.cli.output import stats_line

        sys.stderr.write(stats_line(outputs, seconds) + "\n")
    return 1 if writer.num_failed else 0


def _check_output(name: str, prompts: str | None) -> None:
    path = Path(name)
    if name == "-":
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"argument --output: {name!r} must be a file in a directory that exists")
    if prompts is not None and _is_same_file(prompts, path):
        raise UsageError(f"argument --output: {name!r} must be another file than --prompts, which it would overwrite")


def _is_same_file(prompts: str, output: Path) -> bool:
    """Whether writing the output would overwrite the prompts, also through a link or a redirected stdin."""
    try:
        source = os.fstat(sys.stdin.fileno()) if prompts == "-" else os.stat(prompts)
        target = output.stat()
    except (OSError, ValueError, AttributeError):  # one of them does not exist, or stdin has no descriptor
        return False
    return stat.S_ISREG(target.st_mode) and os.path.samestat(source, target)


def _check_speculator(config: dict[str, Any] | None) -> None:
    """Refuse a wrong configuration before a model is loaded."""
    from specround.cli.search_path import add_working_directory
    from specround.contract import parse_speculative_config

    if config is not None:
        add_working_directory()
        parse_speculative_config(config)


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    from specround.contract import RequestError
    from specround.engine import SamplingParams

    try:
        return SamplingParams(
            temperature=arguments.temperature,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            stop=arguments.stop,
            ignore_eos=arguments.ignore_eos,
        )
    except RequestError as error:
        raise UsageError(f"argument --{error.field.replace('_', '-')}: {error}") from error


def _read_requests(arguments: argparse.Namespace, params: SamplingParams) -> list[CliRequest]:
    from specround.cli.requests import requests_of_file, requests_of_prompts

    if arguments.prompts is not None:
        return requests_of_file(arguments.prompts, params)
    return requests_of_prompts(arguments.prompt, params)


def _load(arguments: argparse.Namespace) -> LLM:
    from specround.cli.progress import load_bar, wants_progress
    from specround.engine import LLM

    given = {setting: getattr(arguments, name) for name, setting in _ENGINE_SETTINGS.items()}
    settings = {setting: value for setting, value in given.items() if value is not None}
    with load_bar(wants_progress(arguments.progress)) as report:
        return LLM(
            arguments.model,
            arguments.speculative_config,
            on_load=report,
            record_rounds=arguments.show_rounds,
            **settings,
        )


@contextlib.contextmanager
def _open_output(name: str) -> Iterator[IO[str]]:
    if name == "-":
        yield sys.stdout
        return
    try:
        file = open(name, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"argument --output: cannot write {name!r} ({error.strerror})") from error
    with file:
        yield file


def _writer(
    requests: list[CliRequest], llm: LLM, stream: IO[str], arguments: argparse.Namespace, as_json: bool
) -> OutputWriter:
    from specround.cli.output import OutputWriter, colour_console

    drawing = None
    if arguments.show_rounds:
        drawing = colour_console(sys.stderr if as_json and arguments.output == "-" else sys.stdout)
    return OutputWriter(requests, stream, as_json=as_json, drawing=drawing, tokenizer=llm.tokenizer)


def _generate(
    llm: LLM, requests: list[CliRequest], writer: OutputWriter, arguments: argparse.Namespace
) -> list[RequestOutput]:
    """Run the requests that are not refused yet; results are written as they come."""
    from specround.cli.progress import generation_bar, wants_progress
    from specround.contract import RequestError

    prompts, params, places = [], [], []
    for place, request in enumerate(requests):
        try:
            if request.error is not None:
                raise request.error
            prompts.append(request.engine_prompt(llm.tokenizer, chat=arguments.chat))
        except RequestError as error:
            writer.add(place, error)
            continue
        params.append(request.params)
        places.append(place)
    names = [str(place) for place in places]
    shown = wants_progress(arguments.progress)
    with writer.held(shown and sys.stdout.isatty()), generation_bar(shown, len(places)) as advance:

        def on_update(output: RequestOutput, new_tokens: int) -> None:
            advance(new_tokens, int(output.finished))
            if output.finished:
                writer.add(int(output.request_id), output)

        try:
            return llm.generate(prompts, params, request_ids=names, on_update=on_update) if places else []
        except RequestError as error:  # the only request is refused
            writer.fail_rest(error)
            return []
        except OSError:  # results cannot be written: there is nobody to tell
            raise
        except Exception as error:
            writer.fail_rest(error)
            raise
