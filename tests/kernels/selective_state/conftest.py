"""The folder of the helpers that the tests of recurrent ops share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1]
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests unless the marker expression asks for them."""
    if "gpu" in (config.option.markexpr or ""):
        return
    chosen = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
