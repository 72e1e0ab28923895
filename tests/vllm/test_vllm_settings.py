"""How vLLM is started: arguments, flags, and what is refused before it starts. Needs no vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from types import SimpleNamespace

import pytest

from specround.cli import main
from specround.contract import ConfigError
from specround.integrations.vllm import llm_kwargs, prepare_environment, settings
from specround.integrations.vllm.limits import REFUSALS, check_settings, check_wiring, layer_features, sampling_limit
from specround.integrations.vllm.settings import own_config, serve_arguments

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def good_config(**changes):
    """A configuration that passes, with some fields changed; a field is named by its dotted path."""
    values = {
        "speculative_config.method": "ngram",
        "speculative_config.enable_adaptive_verification": False,
        "model_config.runner_type": "generate",
        "model_config.enforce_eager": True,
        "device_config.device_type": "cpu",
        "cache_config.cache_dtype": "auto",
        "parallel_config.ubatch_size": 0,
    }
    for rule in REFUSALS:
        if rule.field not in values:
            values[rule.field] = 1 if rule.field.endswith("_size") else None
    root = SimpleNamespace()
    for path, value in (values | changes).items():
        *parents, name = path.split(".")
        place = root
        for parent in parents:
            place.__dict__.setdefault(parent, SimpleNamespace())
            place = getattr(place, parent)
        setattr(place, name, value)
    return root


def test_kwargs_carry_the_speculator():
    """The speculator travels in additional_config; vLLM's own speculative config carries only K."""
    kwargs = llm_kwargs(NGRAM, max_model_len=64, additional_config={"other": 1})
    assert kwargs["additional_config"] == {"other": 1, "specround": NGRAM}
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 4
    assert kwargs["max_model_len"] == 64
    assert own_config(kwargs["additional_config"]) == NGRAM


def test_a_cuda_build_gets_the_gpu_worker(monkeypatch):
    """With a torch that has CUDA, the GPU's worker is named and vLLM is told which attention backend to take."""
    monkeypatch.setattr(settings, "is_cpu_build", lambda: False)
    kwargs = llm_kwargs(NGRAM)
    assert kwargs["worker_cls"] == "specround.integrations.vllm.gpu_worker.RoundGPUWorker"
    assert kwargs["attention_backend"] == "CUSTOM"
    words = serve_arguments("m", NGRAM, [])
    assert words[words.index("--attention-backend") + 1] == "CUSTOM"
    with pytest.raises(ConfigError, match="attention_backend='FLASH_ATTN'"):
        llm_kwargs(NGRAM, attention_backend="FLASH_ATTN")
    with pytest.raises(ConfigError, match="--attention-backend"):
        serve_arguments("m", NGRAM, ["--attention_backend=FLASH_ATTN"])


def test_kwargs_refuse_what_they_decide():
    """An argument that the speculator decides, or a speculator that does not exist, is refused by name."""
    with pytest.raises(ConfigError, match="enforce_eager=False"):
        llm_kwargs(NGRAM, enforce_eager=False)
    with pytest.raises(ConfigError, match="num_speculative_tokens=0"):
        llm_kwargs(NGRAM | {"num_speculative_tokens": 0})
    with pytest.raises(ConfigError, match="additional_config"):
        own_config({})


def test_serve_prints_its_command(capsys):
    """`specround vllm serve --print-command` shows the flags; flags of vLLM are handed on."""
    text = json.dumps(NGRAM)
    assert main(["vllm", "serve", "m", "--port", "1", "--speculative-config", text, "--print-command"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("python -m specround.integrations.vllm.serve serve m ")
    assert printed.rstrip().endswith("--port 1")
    assert "--worker-cls specround.integrations.vllm.worker.RoundWorker" in printed
    assert main(["vllm", "serve", "--speculative-config", text, "--print-command", "m", "--port", "1"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["vllm", "serve", "smollm2", "--speculative-config", text]) == 2
    assert "specround export smollm2 DIRECTORY" in capsys.readouterr().err
    assert main(["vllm", "serve", "m"]) == 2
    assert "--speculative-config is required" in capsys.readouterr().err
    assert main(["vllm", "serve", "--speculative_config", text, "m", "-sc", text]) == 2
    assert "--speculative-config is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    [
        *(
            "--worker_cls=x",
            "--worker-c",
            "-sc",
            "-sc.num_speculative_tokens",
            "--speculative-confi",
            "--spec-tokens=7",
        ),
        *("--speculative-config.num_speculative_tokens", "--additional-config.x", "--no-enforce", "--async-sched"),
        "--spec-tokens=7",
    ],
)
def test_serve_refuses_every_form_of_what_it_fills_in(word):
    """Abbreviations, dotted keys and repeated flags, which vLLM takes, are not handed on."""
    with pytest.raises(ConfigError, match=f"argument='{re.escape(word)}': must be left out: --"):
        serve_arguments("m", NGRAM, [word, "1"])


def test_serve_hands_on_what_only_looks_alike():
    """Flags of vLLM that start otherwise, and values, are handed on."""
    others = ["--port", "1", "--max-num-seqs=2", "-tp", "1", "--served-model-name", "worker", ""]
    assert serve_arguments("m", NGRAM, others)[-len(others) :] == others


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel_config.worker_cls", "auto"),
        ("scheduler_config.scheduler_cls", None),
        ("scheduler_config.scheduler_cls", dict),
        ("speculative_config.num_speculative_tokens", 9),
    ],
)
def test_what_was_filled_in_must_have_stayed(field, value):
    """Worker, scheduler and K that something else replaced are refused by name, not run without the speculator."""
    wired = {
        "parallel_config.worker_cls": llm_kwargs(NGRAM)["worker_cls"],
        "scheduler_config.scheduler_cls": llm_kwargs(NGRAM)["scheduler_cls"],
        "speculative_config.num_speculative_tokens": 4,
    }
    check_wiring(good_config(**wired), 4)
    with pytest.raises(ConfigError, match=f"{field}=.*fill in"):
        check_wiring(good_config(**wired | {field: value}), 4)


def test_environment_that_cannot_work(monkeypatch):
    """On a CPU the interpreter must be on, and vLLM not yet imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET='0': must be '1' on a CPU"):
        prepare_environment()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm')\n"
    code += "from specround.integrations.vllm import prepare_environment; prepare_environment()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "must be called before vLLM is imported" in done.stderr


@pytest.mark.skipif("vllm" in packages_distributions(), reason="vLLM is installed")
def test_serve_without_vllm_says_what_is_missing(capsys):
    """Without vLLM the command fails in one line that names the versions."""
    assert main(["vllm", "serve", "--speculative-config", json.dumps(NGRAM), "m"]) == 2
    assert "installed, in version 0.32.0 or 0.33.0" in capsys.readouterr().err


def test_importing_the_integration_is_light():
    """The command line asks the integration for flags without loading torch or vLLM."""
    code = "import sys, specround.integrations.vllm; sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_good_settings_pass():
    """The configuration that the refusals below change is itself accepted."""
    check_settings(good_config())


@pytest.mark.parametrize("rule", REFUSALS, ids=lambda rule: rule.field)
def test_each_setting_is_refused_by_name(rule):
    """A value that is not hosted is refused with field, value and what is allowed."""
    bad = {"enforce_eager": False, "cache_dtype": "fp8", "device_type": "xpu"}
    name = rule.field.rpartition(".")[2]
    value = bad.get(name, 2 if name.endswith("_size") else "something")
    with pytest.raises(ConfigError) as caught:
        check_settings(good_config(**{rule.field: value}))
    assert str(caught.value) == f"{rule.field}={value!r}: must be {rule.allowed}"


def test_unknown_settings_are_refused():
    """A field that this vLLM does not have cannot be checked, so it is refused."""
    config = good_config()
    del config.lora_config
    with pytest.raises(ConfigError, match="lora_config"):
        check_settings(config)


def test_layers_name_what_lowers_them():
    """ALiBi, KV sharing and the rest become features that the kernels decline."""
    plain = SimpleNamespace(alibi_slopes=None, logits_soft_cap=0, sinks=None)
    assert layer_features(plain) == (frozenset(), None, None, False)
    odd = SimpleNamespace(
        alibi_slopes=[1], kv_sharing_target_layer_name="x", logits_soft_cap=2.0, sinks=[0], round_window=4
    )
    assert layer_features(odd) == (frozenset({"alibi", "kv_sharing"}), 4, 2.0, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 1.2), ("presence_penalty", 0.1), ("bad_words", ["x"]), ("logprobs", 0)],
)
def test_requests_without_drafts(name, value):
    """A request whose rows would need a history of their own verifies nothing but its root."""
    assert sampling_limit(SimpleNamespace(temperature=0.7, top_p=0.9)).kind == "mask"
    limit = sampling_limit(SimpleNamespace(**{name: value}))
    assert limit.kind == "none"
    assert name in limit.reason
