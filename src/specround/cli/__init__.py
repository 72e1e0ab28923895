"""The command line: `specround generate`, `models`, `fetch`, `demo` and `bench`."""

from specround.cli.entry import main

__all__ = ["main"]
