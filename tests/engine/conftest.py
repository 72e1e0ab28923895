"""Tiny checkpoints, the plain answers of each, and the paths of the example speculators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import adversarial  # noqa: E402, F401  (registers "adversarial")
import tree_speculator  # noqa: E402, F401  (registers "recall")
from plain_reference import PlainReference  # noqa: E402
from speculator_fleet import Models  # noqa: E402

from tiny_models import tiny_llama  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run full products only when the marker expression asks for them."""
    if "exhaustive" in (config.option.markexpr or ""):
        return
    chosen = [item for item in items if item.get_closest_marker("exhaustive") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> PlainReference:
    """A model of 24 tokens: its outputs repeat, so that copying drafters have something to copy."""
    return PlainReference(tiny_llama(tmp_path_factory.mktemp("target"), seed=1, vocab_size=24))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter that knows nothing of the target, has other sizes and a larger vocabulary."""
    path = tmp_path_factory.mktemp("foreign")
    return str(tiny_llama(path, seed=2, vocab_size=32, layers=1, hidden=16, heads=2, kv_heads=1))


@pytest.fixture(scope="session")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's own weights with a context of 20 tokens."""
    return str(tiny_llama(tmp_path_factory.mktemp("short"), seed=1, vocab_size=24, max_position=20))


@pytest.fixture(scope="session")
def models(target: PlainReference, foreign: str, short_context: str) -> Models:
    return Models(target, foreign, short_context)


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> PlainReference:
    """A model with a tokenizer."""
    return PlainReference(tiny_llama(tmp_path_factory.mktemp("speaking"), seed=4, with_tokenizer=True))
