"""Tiny random recurrent and hybrid models, each with what one-token decoding leaves."""

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
from hybrid_reference import Hybrids  # noqa: E402

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
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Hybrids:
    """Models by type, written when first asked for."""
    return Hybrids(tmp_path_factory.mktemp("hybrids"))


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An attention model that drafts for models with the same vocabulary."""
    return str(tiny_llama(tmp_path_factory.mktemp("drafter"), seed=2))
