"""What is refused when vLLM starts, from inside vLLM."""

from __future__ import annotations

import pytest
from vllm_targets import ENGINE, VOCAB, Target, make_asks

from tiny_models import tiny_model

pytestmark = pytest.mark.vllm
SLOW = pytest.mark.exhaustive


def test_groups_of_layers(gemma3):
    """Layers whose block tables differ are refused with the setting that gives them one, which then works."""
    config = gemma3.config("adversarial_mask")
    message = r"kv_cache_groups=2: must be 1: with disable_hybrid_kv_cache_manager=True"
    with pytest.raises(AssertionError, match=message):
        gemma3.run("two-groups", config)
    made = gemma3.run("one-group", config, engine=ENGINE | {"disable_hybrid_kv_cache_manager": True})
    assert made["tokens"][0] == gemma3.plain
    assert made["moves"] > 10


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"enable_lora": True}, r"lora_config=.*: must be unset"),
        pytest.param({"tensor_parallel_size": 2}, r"tensor_parallel_size=2: must be 1", marks=SLOW),
        pytest.param({"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2: must be 1", marks=SLOW),
        ({"kv_cache_dtype": "fp8"}, r"cache_dtype='fp8': must be 'auto'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings(llama, engine, message):
    """Settings of vLLM reach the refusals by the names that are documented."""
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # otherwise vLLM asks for a NUMA node for each rank, first
    config, name = llama.config("ngram"), "refused-" + "-".join(engine)
    with pytest.raises(AssertionError, match=message):
        llama.run(name, config, engine=ENGINE | engine, environment=unbound)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"worker_cls": "auto"}, r"worker_cls='\S+': must be 'specround\S+' or"),
        ({"scheduler_cls": None}, r"scheduler_cls=\S+: must be 'specround"),
        ({"num_speculative_tokens": 9}, r"num_speculative_tokens=9: must be 5"),
    ],
    ids=["worker_cls", "scheduler_cls", "num_speculative_tokens"],
)
def test_wiring(llama, engine, message):
    """What a later argument puts in the place of ours is refused, not run without the speculator."""
    with pytest.raises(AssertionError, match=message):
        llama.run("wired-" + "-".join(engine), llama.config("ngram"), rewired=engine)


def test_hidden_states_of_layers(llama):
    """A speculator that reads the hidden states of single layers is told what it may declare."""
    with pytest.raises(AssertionError, match=r"hidden_states=\(0, 1\): must be 'none' or 'last'"):
        llama.run("layered", {"method": "layered", "num_speculative_tokens": 4})


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_recurrent_layers(tmp_path, model_type):
    """A model with recurrent layers is refused, with the reason."""
    model = tiny_model(tmp_path / "model", model_type)
    target = Target(tmp_path, str(model), make_asks(VOCAB, 1), VOCAB)
    with pytest.raises(AssertionError, match="is_hybrid=True: must be False: recurrent states are not hosted in vLLM"):
        target.run("hybrid", target.config("ngram"))
