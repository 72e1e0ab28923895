"""The documents, and a tiny model that stands in for SmolLM2 when their examples run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]


@pytest.fixture
def document() -> Callable[[str], str]:
    return lambda name: (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture
def blocks(document: Callable[[str], str]) -> Callable[[str, str], list[str]]:
    """Fenced blocks of a language in a document."""

    def find(name: str, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", document(name), re.DOTALL | re.MULTILINE)

    return find


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("docs") / "tiny"
    return str(tiny_llama(directory, with_tokenizer=True, eos_token_id=None, max_position=512))
