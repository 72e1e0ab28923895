"""The argument parser: one-line errors, and checks of single arguments."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn


class UsageError(Exception):
    """The command line, or a file it names, cannot be used as it stands: exit code 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, so that they are printed in one line like every other error."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving the process."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def json_object(text: str) -> dict[str, Any]:
    """The type of `--speculative-config`: a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value
