"""A tiny model, a handful of prompts, and `specround bench` as the shell sees it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from specround.cli import main
from tiny_models import tiny_llama


class Finished(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object of the last line."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    return str(tiny_llama(directory, with_tokenizer=True, eos_token_id=None, max_position=512))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three prompts of two kinds."""
    path = tmp_path_factory.mktemp("prompts") / "some.jsonl"
    texts = {"edit": ["in the ring in the ring", "on on on"], "chat": ["other things"]}
    lines = [
        {"id": f"{kind}-{number}", "kind": kind, "prompt": text}
        for kind, each in texts.items()
        for number, text in enumerate(each)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def bench(
    model: str, prompts: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Finished]:
    """Run the command on the tiny model, as short as it can be, on an idle machine; later arguments win."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))

    def run(*arguments: str) -> Finished:
        short = ("--max-tokens", "6", "--repeats", "1", "--no-row-curve", "--threads", "1")
        code = main(["bench", "--model", model, "--prompts", prompts, *short, *arguments])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run
