"""Paths of what the tests of this folder share with others, and a tiny target for those that run an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "tests" / "engine", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tiny_models import tiny_llama  # noqa: E402


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 24 tokens, so that copying drafters have something to copy."""
    return str(tiny_llama(tmp_path_factory.mktemp("target"), seed=1, vocab_size=24))
