"""On a GPU: a steady step never waits for the device, and a captured round serves other requests and blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specround import LLM, SamplingParams
from tiny_models import tiny_llama

pytestmark = pytest.mark.gpu

DRAFT_MODEL = "specround.speculators.draft_model:DraftModelConfig"
RECALL = "tree_speculator:RecallConfig"
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12, 13], [3], [9, 9, 4, 9, 9, 4, 9]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target = tiny_llama(tmp_path_factory.mktemp("target"), seed=1, hidden=64, heads=4, kv_heads=2, max_position=1024)
    drafter = tiny_llama(tmp_path_factory.mktemp("drafter"), seed=1, layers=1, max_position=1024)
    return str(target), str(drafter)


@pytest.fixture
def errors_on_sync() -> Iterator[Any]:
    """A switch that makes every implicit synchronisation an error, off again afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that the mode is a prototype
        yield lambda: torch.cuda.set_sync_debug_mode("error")
        torch.cuda.set_sync_debug_mode("default")


def speculations(models: tuple[str, str]) -> list[dict[str, Any] | None]:
    target, drafter = models
    return [
        {"method": DRAFT_MODEL, "model": target, "num_speculative_tokens": 4},
        {"method": DRAFT_MODEL, "model": target, "num_speculative_tokens": 9, "max_branching": 3},
        {"method": DRAFT_MODEL, "model": drafter, "num_speculative_tokens": 6, "max_branching": 2},
        {"method": RECALL, "num_speculative_tokens": 9},
    ]


HOST_DRAFTERS = [
    {"method": "specround.speculators.suffix_tree:SuffixTreeConfig", "num_speculative_tokens": 9},
    {"method": "specround.speculators.ngram:NgramConfig", "num_speculative_tokens": 4},
]


def sampling(temperature: float, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=tokens, ignore_eos=True)


def generate(path: str, speculation: dict[str, Any] | None, temperature: float, **settings: Any) -> list[list[int]]:
    llm = LLM(path, speculation, dtype="float32", max_model_len=512, num_blocks=200, **settings)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling(temperature, 60))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_equal_plain_decoding(models: tuple[str, str], temperature: float, graphs: bool) -> None:
    """With and without captured rounds, every speculator generates what plain decoding does."""
    plain = generate(models[0], None, temperature, device="cuda", async_scheduling=False)
    assert plain == generate(models[0], None, temperature, device="cpu")
    for speculation in [None, *speculations(models), *HOST_DRAFTERS]:
        assert generate(models[0], speculation, temperature, device="cuda", cuda_graphs=graphs) == plain, speculation


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fifty_steady_steps_never_synchronise(
    models: tuple[str, str], which: int, graphs: bool, temperature: float, errors_on_sync: Any
) -> None:
    """Fifty decode steps with a device drafter run with synchronisation forbidden."""
    speculation = speculations(models)[which]
    llm = LLM(
        models[0], speculation, dtype="float32", device="cuda", max_model_len=1024, num_blocks=400, cuda_graphs=graphs
    )
    core = llm.engine.core
    for i, prompt in enumerate(PROMPTS):
        _, ids = llm._inputs.tokenise({"prompt_token_ids": prompt})
        core.add(llm._inputs.build(str(i), ids, sampling(temperature, 900), 0))
    for _ in range(6):
        core.step()
    errors_on_sync()
    delivered = sum(len(update.new_token_ids) for _ in range(50) for update in core.step())
    assert delivered >= 50 * len(PROMPTS)
    assert core.scheduler.running
    core.shutdown()


def test_a_forbidden_synchronisation_is_noticed(errors_on_sync: Any) -> None:
    """Negative control: reading a device value under the same switch raises."""
    value = torch.ones(1, device="cuda")
    errors_on_sync()
    with pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


def test_a_captured_round_is_replayed_with_other_block_tables(models: tuple[str, str]) -> None:
    """One capture serves requests that come later, in other slots and blocks, and padding touches no live state."""
    target, _ = models
    speculation = {"method": DRAFT_MODEL, "model": target, "num_speculative_tokens": 9, "max_branching": 3}
    shared = {"dtype": "float32", "max_model_len": 512, "num_blocks": 200, "device": "cuda", "max_num_seqs": 4}
    llm = LLM(target, speculation, cuda_graphs=True, block_size=4, **shared)
    plain = LLM(target, None, **shared)
    graphs = llm.engine.core.runner._graphs
    assert graphs is not None
    tables = set()
    for first in (0, 1, 2):
        prompts = [{"prompt_token_ids": [*prompt, first]} for prompt in PROMPTS[first:]]  # 4, 3 (padded to 4), 2
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, sampling(0.0, 40))]
        pool_before = llm.engine.core.scheduler.pool._free[0]
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, sampling(0.0, 40))] == expected
        tables.add(pool_before)
    assert graphs.num_replays > 10
    assert len(graphs._graphs) <= 4
    assert len(tables) == 3, "each run used other blocks"
