"""How vLLM is started with a speculator: the arguments of its `LLM`, the flags of its `serve`, its environment."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from specround.contract import ConfigError, parse_speculative_config

CONFIG_KEY: Final = "specround"
"""Key of the speculative config in vLLM's `additional_config`."""
CPU_WORKER: Final = "specround.integrations.vllm.worker.RoundWorker"
GPU_WORKER: Final = "specround.integrations.vllm.gpu_worker.RoundGPUWorker"
SCHEDULER: Final = "specround.integrations.vllm.scheduler.RoundScheduler"
ENVIRONMENT: Final[Mapping[str, str]] = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment variables that vLLM needs on every device."""
CPU_ENVIRONMENT: Final[Mapping[str, str]] = {"TRITON_INTERPRET": "1"}
"""What it needs besides on a CPU, where the V2 runner's kernels run in Triton's interpreter."""


def llm_kwargs(speculative_config: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Arguments for `vllm.LLM(model, **llm_kwargs(...))`.

    Call `prepare_environment` before vLLM is imported.

    Args:
        speculative_config: As `specround.LLM` takes it: `{"method": ..., "num_speculative_tokens": K, ...}`.
        others: Further arguments of `vllm.LLM`.

    Raises:
        ConfigError: The speculative config is wrong, or another argument is decided by it.

    Example:
        >>> llm_kwargs({"method": "ngram", "num_speculative_tokens": 4})["speculative_config"]["num_speculative_tokens"]
        4
    """
    num_drafts = parse_speculative_config(speculative_config).num_speculative_tokens
    own: dict[str, Any] = {
        "worker_cls": CPU_WORKER if is_cpu_build() else GPU_WORKER,
        "scheduler_cls": SCHEDULER,
        "speculative_config": carrier_config(num_drafts),
        "async_scheduling": False,
        "enforce_eager": True,
    }
    if not is_cpu_build():  # on a CPU vLLM has one backend, whose place the worker takes
        own["attention_backend"] = "CUSTOM"
    for name, value in own.items():
        if name in others and others[name] != value:
            raise ConfigError(name, others[name], f"left out: the speculator needs {value!r}")
    additional = others.pop("additional_config", None) or {}
    if not isinstance(additional, Mapping):
        raise ConfigError("additional_config", additional, "a mapping: the speculator is added to it")
    if CONFIG_KEY in additional:
        raise ConfigError(f"additional_config[{CONFIG_KEY!r}]", additional[CONFIG_KEY], "left out: it is filled in")
    return {**others, **own, "additional_config": {**additional, CONFIG_KEY: dict(speculative_config)}}


def serve_arguments(model: str, speculative_config: Mapping[str, Any], others: list[str]) -> list[str]:
    """Arguments of `vllm serve`.

    Args:
        model: The target.
        speculative_config: As `llm_kwargs` takes it; must be expressible in JSON.
        others: Further arguments, handed on as they are.

    Raises:
        ConfigError: The speculative config is wrong, or a flag is decided by it.
    """
    own = llm_kwargs(speculative_config)
    flags = {
        "--worker-cls": own["worker_cls"],
        "--scheduler-cls": own["scheduler_cls"],
        "--speculative-config": json.dumps(own["speculative_config"]),
        "--additional-config": json.dumps(own["additional_config"]),
    }
    if "attention_backend" in own:
        flags["--attention-backend"] = own["attention_backend"]
    switches = ["--no-async-scheduling", "--enforce-eager"]
    taken = (*flags, "--async-scheduling", "--no-enforce-eager", "--spec-tokens", "--spec-method", "--spec-model")
    for word in others:
        meant = _meant_flag(word, taken)
        if meant is not None:
            raise ConfigError("argument", word, f"left out: {meant} follows from the speculative config")
    return ["serve", model, *(word for flag in flags.items() for word in flag), *switches, *others]


def _meant_flag(word: str, flags: Iterable[str]) -> str | None:
    """The flag that vLLM's parser would take a word for: it allows abbreviations, dotted keys and underscores."""
    name = re.split(r"[=.]", word)[0].replace("_", "-")
    if name == "-sc":
        return "--speculative-config"
    if not name.startswith("--") or name == "--":
        return None
    return next((flag for flag in flags if flag.startswith(name)), None)


def carrier_config(num_drafts: int) -> dict[str, Any]:
    """A speculative config that makes vLLM schedule rows for `num_drafts` drafts; its own drafter is replaced."""
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_max": 1,
        "prompt_lookup_min": 1,
    }


def own_config(additional_config: object) -> dict[str, Any]:
    """The speculative config in vLLM's `additional_config`.

    Raises:
        ConfigError: There is none: our worker or scheduler class was named without it.
    """
    found = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
    if not isinstance(found, Mapping):
        allowed = "a speculative config: start vLLM with specround.integrations.vllm.llm_kwargs or specround vllm serve"
        raise ConfigError(f"additional_config[{CONFIG_KEY!r}]", found, allowed)
    return dict(found)


def prepare_environment() -> None:
    """Set what vLLM reads from the environment; call it before vLLM is imported. Values already set are kept.

    Raises:
        ConfigError: On a CPU, vLLM was imported before, or Triton's interpreter is switched off.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_cpu_build():
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
            if os.environ[name] != value:
                raise ConfigError(name, os.environ[name], f"{value!r} on a CPU, where vLLM's V2 runner is interpreted")
        from specround.integrations.vllm.interpreter import allow_interpreter_on_cpu

        if not allow_interpreter_on_cpu() and "vllm" in sys.modules:
            raise ConfigError("prepare_environment", "called late", "called before vLLM is imported")


@cache
def is_cpu_build() -> bool:
    """Whether the torch that is installed has no CUDA; reads its `version.py`, imports nothing heavy."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    for node in ast.walk(ast.parse(Path(found.origin).with_name("version.py").read_text(encoding="utf-8"))):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "cuda" and isinstance(node, ast.AnnAssign):
            return isinstance(node.value, ast.Constant) and node.value.value is None
    return True
