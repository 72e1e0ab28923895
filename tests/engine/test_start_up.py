"""What is sized, checked and refused when an engine starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_reference import Ask, PlainReference
from scripted import scripted

from specround import LLM, SpecResources
from specround.contract import ConfigError, DraftLayer, SpeculatorError
from specround.engine import EngineConfig, build, memory
from tiny_models import tiny_model


def test_the_largest_settings_start(target: PlainReference) -> None:
    """Each cap is itself allowed: the engine starts and answers."""
    config = {"method": "ngram", "num_speculative_tokens": 4096}
    sizes = {"max_num_seqs": 4096, "max_num_batched_tokens": 1 << 20, "block_size": 4096}
    ask = Ask((5, 6), 4)
    output = LLM(target.path, config, max_model_len=16, **sizes).generate(ask.as_prompt, ask.params)[0]
    assert tuple(output.outputs[0].token_ids) == target.answers([ask])[0]


@pytest.mark.parametrize("error", [RuntimeError("[enforce fail]\nmore"), MemoryError("none left")])
@pytest.mark.parametrize(("settings", "field"), [({"num_blocks": 9}, "num_blocks"), ({}, "max_model_len")])
def test_an_allocator_that_refuses(
    settings: dict[str, Any], field: str, error: Exception, target: PlainReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the allocator raises becomes one line that names the setting which decided the size."""

    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(build, "KVCache", refuse)
    with pytest.raises(ConfigError, match=r"must be smaller: a KV pool of .* bytes on cpu \(") as caught:
        LLM(target.path, max_model_len=32, **settings)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_state_that_does_not_fit(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-request state is checked against the free memory before the KV pool is sized; max_num_seqs decides it."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 10_000)
    with pytest.raises(ConfigError, match=r"max_num_seqs=64: must be smaller: the state of 64 requests of 256 tokens"):
        LLM(target.path, max_num_seqs=64)


def test_the_default_pool_follows_the_free_memory(target: PlainReference, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full machine the default pool shrinks; where the system does not say how much is free, it does not."""
    sizes = []
    for free in (10_000_000, 100_000, None):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        monkeypatch.setattr(build, "free_memory", lambda device, free=free: free)
        llm = LLM(target.path, max_model_len=64, max_num_seqs=16)
        sizes.append(llm.engine.core.scheduler.pool.num_total)
    assert sizes[1] < sizes[0] == sizes[2] == 16 * 4


def test_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux's available memory, a container's limit below it, all of the machine's memory elsewhere."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    everything = memory.free_memory(cpu)
    assert everything is not None
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:   50 kB\n")
    assert memory.free_memory(cpu) == 50 * 1024 < everything
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(cpu) == 50 * 1024
    (tmp_path / "memory.max").write_text("4096\n")
    assert memory.free_memory(cpu) == 4096


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, True), (torch.float16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("as_drafter", [False, True])
def test_graphs_of_experts_need_bfloat16(dtype: torch.dtype, refused: bool, as_drafter: bool) -> None:
    """A target or draft model with experts in another type is refused with the reason; dense models are not."""

    def model(model_type: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(model_type=model_type), name="target", dtype=dtype)

    def graphs(*models: Any) -> Any:
        state = SimpleNamespace(block_tables=SimpleNamespace(device=torch.device("cuda")), max_model_len=16)
        config = EngineConfig(model="m", cuda_graphs=True)
        return build._graphs(config, models, SpecResources(max_candidates=1), state, None, check_values=False)

    models = [model("llama"), model("mixtral")] if as_drafter else [model("mixtral")]
    if not refused:
        assert graphs(*models) is not None
        return
    assert graphs(model("llama")) is not None
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=f"cuda_graphs=True: must be False with the experts of .*'mixtral' in {name}"):
        graphs(*models)


def test_longrope_stays_within_the_original_length(tmp_path: Path) -> None:
    """By default a LongRoPE model serves its original length, past which rotations mix; more can be asked for."""
    path = str(tiny_model(tmp_path, "phi3"))
    config = json.loads((tmp_path / "config.json").read_text())
    longest = config["max_position_embeddings"]
    factors = [1.0] * (config["hidden_size"] // config["num_attention_heads"] // 2)
    original = longest // 4
    config["original_max_position_embeddings"] = original
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 1.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert LLM(path).engine.max_model_len == original
    assert LLM(path, max_model_len=longest).engine.max_model_len == longest


ANSWERS: dict[str, tuple[str, Any, str]] = {
    **{
        f"{hook} returns {value!r}": (hook, value, f"{hook} failed: it returned {value!r}: must be a {wanted}")
        for hook, wanted in (("declare_resources", "SpecResources"), ("create", "BaseSpeculator"))
        for value in (None, 3, "x")
    },
    **{f"adapt_resources returns {value!r}": ("adapt_resources", value, "failed: ") for value in (None, 3, "x")},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_start_up_hook_that_answers_nonsense(name: str, target: PlainReference) -> None:
    """The error names the config's class and the hook that answered, not the next one that stumbles over it."""
    hook, value, message = ANSWERS[name]
    with pytest.raises(SpeculatorError, match=message) as caught:
        LLM(target.path, scripted(3, **{hook: lambda *_: value}))
    assert (caught.value.speculator, caught.value.hook) == ("ScriptedConfig", hook)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_branching": 3}, "adapt_resources=3: must be max_branching of at most the declared 2"),
        ({"custom_mask": True}, "adapt_resources='mask': must be at most the declared 'tree'"),
        ({"max_candidates": 5}, "adapt_resources=5: must be max_candidates of at most the declared 4"),
        ({"drafting": "host"}, "adapt_resources='host': must be drafting='device', as declared"),
        ({"hidden_states": "last"}, "adapt_resources='last': must be hidden_states='none', as declared"),
        ({"draft_layers": (DraftLayer(name="a", num_kv_heads=1, head_dim=8),)}, r"must be draft_layers=\(\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adapted_resources_stay_below_the_declared(
    changes: dict[str, Any], message: str, target: PlainReference
) -> None:
    """Memory is sized and the engine is built for the declared resources; an answer above them is refused."""
    declared = SpecResources(max_candidates=4, max_branching=2)
    config = scripted(3, resources=declared, adapt_resources=lambda *_: replace(declared, **changes))
    with pytest.raises(ConfigError, match=f"ScriptedConfig.*{message}"):
        LLM(target.path, config)


def test_a_speculator_that_leaves_at_start_up(target: PlainReference) -> None:
    """A hook that ends the process is refused like one that raises."""

    def leave(*_: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(SpeculatorError, match="create failed: SystemExit: 3"):
        LLM(target.path, scripted(3, create=leave))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_speculative_tokens": 2, "branches": 5},
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 63, "branches": 63},
    ],
    ids=str,
)
def test_the_example_takes_any_sizes(sizes: dict[str, int], target: PlainReference) -> None:
    """More branches than drafts, or than the context is long: the example still drafts, and texts stay the same."""
    asks = [Ask((5, 6, 5, 6, 5), 8), Ask((7,), 8)]
    llm = LLM(target.path, {"method": "recall", **sizes}, max_model_len=16)
    outputs = llm.generate([a.as_prompt for a in asks], [a.params for a in asks])
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == target.answers(asks)
    assert sum(output.metrics.drafted for output in outputs) > 0
