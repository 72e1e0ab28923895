"""`specround export`: write a model as a Hugging Face directory, for other engines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Write a model with its tokenizer and chat template as a Hugging Face directory, which vLLM and others load: a packaged
model, a GGUF file, or a directory in another type of weights. The directory's path is printed.

examples:
  specround export smollm2 ./my-model
  specround export model.gguf ./my-model --dtype bfloat16
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export", help="write a model as a Hugging Face directory", description=_DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="as `specround generate --model` takes it")
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="empty, or not there yet")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bar on stderr (default: on a terminal)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Export one model."""
    from specround.cli.progress import load_bar, wants_progress
    from specround.models.export import export_model

    with load_bar(wants_progress(arguments.progress)) as report:
        export_model(arguments.model, arguments.directory, arguments.dtype, on_progress=report)
    sys.stdout.write(f"{arguments.directory}\n")
    return 0
