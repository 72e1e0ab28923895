"""`specround vllm serve`: start `vllm serve` with a speculator of ours."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from specround.cli.parser import Parser, UsageError, json_object

_DESCRIPTION = """\
Start `vllm serve MODEL` with a speculator. The flags that vLLM needs for it are filled in; every argument behind MODEL
that is not listed here is handed on to vLLM as it is. vLLM has to be installed beside this package, in a supported
version: see docs/vllm.md.

filled in: --worker-cls, --scheduler-cls, --speculative-config (which carries only the number of drafts),
--additional-config (which carries the speculator), --no-async-scheduling, --enforce-eager, on a CUDA device
--attention-backend, and the environment: VLLM_USE_V2_MODEL_RUNNER=1, and on a CPU Triton's interpreter.

examples:
  specround vllm serve ./my-model --speculative-config '{"method": "suffix_tree", "num_speculative_tokens": 12}'
  specround vllm serve ./my-model --port 8001 --max-model-len 4096 --print-command \\
      --speculative-config '{"method": "tree_speculator:RecallConfig", "num_speculative_tokens": 12}'
"""

_PREPARED = ("-m", "specround.integrations.vllm.serve")
"""Runs vLLM's command line once its environment is prepared."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "vllm", help="serve with vLLM, with a speculator of ours", description=_DESCRIPTION
    )
    parser.add_argument("action", choices=("serve",), help="what vLLM does")
    parser.add_argument("model", metavar="MODEL", help="as `vllm serve` takes it")
    _add_options(parser)
    parser.add_argument("others", nargs=argparse.REMAINDER, metavar="...", help="further arguments of `vllm serve`")
    parser.set_defaults(run=run)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-sc", "--speculative-config", "--speculative_config"),
        type=json_object,
        metavar="JSON",
        help="the speculator, as for `specround generate`",
    )
    parser.add_argument("--print-command", action="store_true", help="print the command instead of running it")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by vLLM's, or print its command."""
    from specround.cli.search_path import add_working_directory
    from specround.integrations.vllm.settings import serve_arguments
    from specround.integrations.vllm.versions import check_version
    from specround.models.sources import MODEL_ALIASES

    behind = Parser(prog="specround vllm serve", add_help=False)  # options of ours that stand behind MODEL
    _add_options(behind)
    ours, others = behind.parse_known_args(arguments.others)
    given = [words.speculative_config for words in (arguments, ours) if words.speculative_config is not None]
    if len(given) > 1:
        raise UsageError("--speculative-config is given twice, before MODEL and behind it: give it once")
    if not given:
        raise UsageError("--speculative-config is required (see specround vllm --help)")
    if arguments.model in MODEL_ALIASES and not os.path.isdir(arguments.model):
        wanted = f"a directory or a hub id: specround export {arguments.model} DIRECTORY writes this one for vLLM"
        raise UsageError(f"MODEL={arguments.model!r}: must be {wanted}")
    add_working_directory()
    words = serve_arguments(arguments.model, given[0], others)
    if ours.print_command or arguments.print_command:
        sys.stdout.write(shlex.join(["python", *_PREPARED, *words]) + "\n")
        return 0
    check_version()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *_PREPARED, *words])
