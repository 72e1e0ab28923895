"""Tiny checkpoints and their Hugging Face references, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from cache_oracle import Reference  # noqa: E402

from tiny_models import tiny_llama  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tiny_llama(tmp_path_factory.mktemp("target"), seed=1))


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tiny_llama(tmp_path_factory.mktemp("drafter"), seed=2, layers=1, hidden=16, heads=2, kv_heads=1))
