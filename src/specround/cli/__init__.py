"""The command line: `specround generate`, `models`, `fetch`, `export`, `demo`, `bench` and `vllm`."""

from specround.cli.entry import main

__all__ = ["main"]
