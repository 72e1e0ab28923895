"""The command line: `specround generate`, `models`, `fetch` and `demo`."""

from specround.cli.entry import main

__all__ = ["main"]
