"""A tiny model for the command line, and `main` as the shell sees it: exit code, stdout, stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from specround.cli import main
from tiny_models import tiny_llama


class Finished(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("cli") / "tiny"
    return str(tiny_llama(directory, with_tokenizer=True, eos_token_id=None, max_position=1024))


@pytest.fixture
def specround(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    def run(*arguments: str) -> Finished:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run
