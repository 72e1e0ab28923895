"""`specround bench`: speculation off and on, ours and transformers, on the same prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specround.cli.parser import UsageError, json_object

if TYPE_CHECKING:
    from specround.bench import BenchSettings

_DESCRIPTION = """\
Measure plain decoding, speculators and transformers' generate on the same prompts, in turns. First every speculator
must generate what plain decoding generates (float32: the same tokens; 16-bit types: up to ties); if one does not,
nothing is timed and the exit code is 1.

examples:
  specround bench --per-kind 1 --max-tokens 32
  specround bench --kinds chat,edit --threads 2 --output bench.json --plot bench.png
  specround bench --dtype bfloat16 --batch 8 --no-peers \\
      --speculative-config '{"method": "suffix_tree", "num_speculative_tokens": 12}' \\
      --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
"""
_EPILOG = """\
Tables go to stdout; the last line of stdout is one JSON object with every figure, the settings, the hardware, the
versions and the commit. docs/performance.md says how to read it.
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="measure speculation off and on", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--model", default="smollm2", help="alias, directory, .gguf file or hub id (default: smollm2)")
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        action="append",
        metavar="JSON",
        help="a speculator to measure; repeat it for several (default: suffix_tree and ngram)",
    )
    _add_prompts(parser)
    _add_running(parser)
    parser.add_argument("--output", metavar="FILE", help="write the JSON object to a file, too")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results; needs matplotlib (the extra `bench`)")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bar on stderr (default: on a terminal)"
    )
    parser.set_defaults(run=run)
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="PATH", help="a .jsonl file or a directory of them (default: our own)")
    group.add_argument("--kinds", metavar="A,B", help="kinds of prompts, such as chat,code (default: all)")
    group.add_argument("--per-kind", type=int, default=3, metavar="N", help="prompts of each kind (default: 3 of 10)")
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens per prompt (default: 64)")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap prompts in the chat template (default: if the model has one)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens tokens")


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs; medians count (default: 3)")
    group.add_argument("--batch", type=int, default=1, metavar="N", help="prompts that run at once (default: 1)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")
    group.add_argument("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16, for all alike")
    group.add_argument("--device", metavar="NAME", help="auto, cpu or cuda")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest request, in tokens")
    group.add_argument(
        "--setting",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="another setting of the engine, such as check_values=false; repeat it for several",
    )
    group.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure transformers, too (default)"
    )
    group.add_argument("--lookup-tokens", type=int, default=10, metavar="N", help="transformers' prompt lookup")
    group.add_argument(
        "--row-curve", action=argparse.BooleanOptionalAction, default=True, help="cost of 1 to 64 rows (default)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables and the JSON line."""
    from specround.bench import run_bench
    from specround.bench.plot import check_plotting, write_plot
    from specround.bench.tables import tables
    from specround.cli.output import colour_console, json_line
    from specround.cli.progress import phase_bar, wants_progress
    from specround.cli.search_path import add_working_directory

    add_working_directory()
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"argument --output: cannot write {arguments.output!r}: no such directory")
    if arguments.plot is not None:
        check_plotting(Path(arguments.plot))
    settings = _settings(arguments)
    with phase_bar(wants_progress(arguments.progress)) as report:
        result = run_bench(settings, report)
    console = colour_console()
    for table in tables(result):
        console.print(table)
    for warning in result["warnings"]:
        sys.stderr.write(f"specround: warning: {warning}\n")
    if output is not None:
        output.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        write_plot(result, Path(arguments.plot))
    sys.stdout.write(json_line(result, sys.stdout))
    return 0


def _settings(arguments: argparse.Namespace) -> BenchSettings:
    from specround.bench.prompts import default_prompts
    from specround.bench.settings import DEFAULT_SPECULATORS, BenchSettings

    prompts = default_prompts() if arguments.prompts is None else Path(arguments.prompts)
    if prompts is None:
        raise UsageError("argument --prompts: needed, as this installation has no prompts of its own")
    named = {name: getattr(arguments, name) for name in ("dtype", "device", "max_model_len")}
    engine = {name: value for name, value in named.items() if value is not None} | dict(arguments.setting)
    return BenchSettings(
        model=arguments.model,
        prompts=prompts,
        speculators=tuple(arguments.speculative_config or DEFAULT_SPECULATORS),
        kinds=None if arguments.kinds is None else tuple(kind for kind in arguments.kinds.split(",") if kind),
        per_kind=arguments.per_kind,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
        batch=arguments.batch,
        threads=arguments.threads,
        chat_template=arguments.chat,
        ignore_eos=arguments.ignore_eos,
        peers=arguments.peers,
        checkpoint=_checkpoint(arguments.model),
        lookup_tokens=arguments.lookup_tokens,
        row_curve=arguments.row_curve,
        engine=engine,
    )


def _checkpoint(model: str) -> Path | None:
    from specround.models.sources import resolve_model

    source = resolve_model(model)
    return source.path if source.kind == "directory" else None


def _setting(text: str) -> tuple[str, Any]:
    """The type of `--setting`: a name and a JSON value."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=JSON: {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"the value must be JSON ({error}): {text!r}") from error
