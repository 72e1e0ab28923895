"""What the tests of models share: the suite's tiny checkpoints on the path, and the packaged model opened once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from specround.contract.errors import ModelError
from specround.models.gguf import GgufModel
from specround.models.sources import resolve_model
from specround.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> GgufModel:
    """The packaged SmolLM2, opened; skipped where it is not installed or fetched."""
    try:
        return GgufModel(resolve_model("smollm2").path)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: GgufModel) -> Tokenizer:
    return smollm2.tokenizer(49152)
