"""Paths for the GPU tests; they run only when asked for with `-m gpu` on a machine that has one."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples", ROOT / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests unless the marker expression asks for them."""
    if "gpu" in (config.option.markexpr or ""):
        return
    chosen = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
