"""Where the Triton kernels run: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
for folder in (ROOT / "tests", ROOT / "tests" / "kernels", ROOT / "tests" / "engine", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device; on a CPU the kernels must be interpreted, or they would not be tested at all."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    from triton.runtime.interpreter import InterpretedFunction

    from specround.kernels.tree_attention import triton as op

    assert isinstance(op._attend_tiles, InterpretedFunction), "Triton was imported without TRITON_INTERPRET=1"
    return torch.device("cpu")
