"""Recurrent and hybrid models on a GPU: plain decoding's tokens, captured rounds, steps that never wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specround import LLM, SamplingParams
from specround.models.families import FAMILIES
from tiny_models import tiny_model

pytestmark = pytest.mark.gpu

RECURRENT = sorted(name for name, family in FAMILIES.items() if family.recurrent and family.verifies != "none")
WITHOUT_EXPERTS = [name for name in RECURRENT if FAMILIES[name].experts is None]
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [9, 9, 4, 9, 9, 4, 9]]
RECALL = {"method": "tree_speculator:RecallConfig", "num_speculative_tokens": 7}
SUFFIX = {
    "method": "specround.speculators.suffix_tree:SuffixTreeConfig",
    "num_speculative_tokens": 7,
    "suffix_decoding_max_spec_factor": 4.0,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("hybrids")
    return {name: str(tiny_model(root / name, name)) for name in RECURRENT}


@pytest.fixture
def errors_on_sync() -> Iterator[Any]:
    """A switch that makes every implicit synchronisation an error, off again afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the mode is a prototype
        yield lambda: torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")


def sampling(temperature: float, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=tokens, ignore_eos=True)


def generate(path: str, speculation: dict[str, Any] | None, temperature: float, **settings: Any) -> list[list[int]]:
    llm = LLM(path, speculation, dtype="float32", max_model_len=64, device="cuda", **settings)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling(temperature, 30))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", RECURRENT)
def test_tokens_equal_plain_decoding(model_type: str, state_mode: str, paths: dict[str, str]) -> None:
    """Device and host drafters, with captured rounds where they can be, generate what plain decoding does."""
    graphs = model_type in WITHOUT_EXPERTS
    for temperature in (0.0, 0.8):
        plain = generate(paths[model_type], None, temperature)
        for speculation in (RECALL, SUFFIX):
            settings = {"state_mode": state_mode, "cuda_graphs": graphs}
            assert generate(paths[model_type], speculation, temperature, **settings) == plain, (speculation, settings)
            assert generate(paths[model_type], speculation, temperature, state_mode=state_mode) == plain, speculation


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("state_mode", ["replay", "slots"])
@pytest.mark.parametrize("model_type", WITHOUT_EXPERTS)
def test_steady_steps_never_synchronise(
    model_type: str, state_mode: str, graphs: bool, paths: dict[str, str], errors_on_sync: Any
) -> None:
    """Thirty decode steps with a device drafter run with synchronisation forbidden."""
    settings = {"state_mode": state_mode, "cuda_graphs": graphs, "max_model_len": 256, "device": "cuda"}
    llm = LLM(paths[model_type], RECALL, dtype="float32", **settings)
    core = llm.engine.core
    for i, prompt in enumerate(PROMPTS):
        _, ids = llm._inputs.tokenise({"prompt_token_ids": prompt})
        core.add(llm._inputs.build(str(i), ids, sampling(0.0, 240), 0))
    for _ in range(6):
        core.step()
    errors_on_sync()
    delivered = sum(len(update.new_token_ids) for _ in range(30) for update in core.step())
    assert delivered >= 30
    core.shutdown()
