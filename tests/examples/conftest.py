"""A tiny target whose outputs repeat, its plain answers, and the paths of the example speculators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "tests" / "engine", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from plain_reference import PlainReference  # noqa: E402

from tiny_models import tiny_llama  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> PlainReference:
    """A model of 24 tokens, with little to choose from, so that what it generates comes again."""
    return PlainReference(tiny_llama(tmp_path_factory.mktemp("target"), seed=1, vocab_size=24))
