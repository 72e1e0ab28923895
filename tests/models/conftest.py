"""What the tests of models share: the suite's tiny checkpoints on the path, and the packaged model opened once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from family_reference import ABSENT, FamilyReference, RecurrentReference  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from specround.contract.errors import ModelError  # noqa: E402
from specround.models.families import FAMILIES  # noqa: E402
from specround.models.gguf import GgufModel  # noqa: E402
from specround.models.sources import resolve_model  # noqa: E402
from specround.models.tokenizer import Tokenizer  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

hf_logging.disable_progress_bar()
hf_logging.set_verbosity_error()


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


class FamilyShelf:
    """Tiny checkpoints of every family and the modules of transformers that run them, each made once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, {}

    def __getitem__(self, model_type: str) -> FamilyReference:
        if model_type in ABSENT:
            pytest.skip("this version of transformers is too old")
        if model_type not in self._made:
            kind = RecurrentReference if FAMILIES[model_type].recurrent else FamilyReference
            self._made[model_type] = kind(tiny_model(self._root / model_type, model_type))
        return self._made[model_type]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> FamilyShelf:
    return FamilyShelf(tmp_path_factory.mktemp("families"))
