"""The document of the benchmark says what the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from specround.bench.step_clock import PARTS
from specround.cli.entry import build_parser

TEXT = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")


def test_commands_parse():
    """Every `specround` command of the document is one the parser takes."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("specround ")]
    assert len(commands) >= 5
    for command in commands:
        build_parser().parse_args(command[1:])


def test_every_part_is_explained():
    """The document names every part that a step is split into."""
    assert all(f"`{part}`" in TEXT for part in PARTS)
