"""`BenchSettings`: what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specround.contract import ConfigError

DEFAULT_SPECULATORS: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix_tree", "num_speculative_tokens": 8},
    {"method": "ngram", "num_speculative_tokens": 5},
)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of one benchmark.

    Attributes:
        model: Local directory, `.gguf` file, alias or hub id.
        prompts: A file of JSON lines, or a directory of them.
        speculators: A `speculative_config` for each speculator that is compared with plain decoding.
        kinds: Kinds of prompts; None = all.
        per_kind: Prompts of each kind, the first ones; None = all.
        max_tokens: Tokens generated per prompt, at most.
        repeats: Timed runs of each prompt and variant; medians over them are reported.
        batch: Prompts that run at once. The last batch of a kind is filled up with its first prompts.
        threads: CPU threads of torch; None = as torch chooses.
        chat_template: Wrap prompts in the model's chat template; None = if it has one.
        ignore_eos: Generate `max_tokens` tokens whatever they are.
        peers: Measure transformers, too.
        checkpoint: Hugging Face directory that the peers load; None = they take over the engine's weights, as for GGUF.
        lookup_tokens: Drafts of transformers' prompt lookup.
        row_curve: Measure what 1 to 64 rows per forward cost.
        engine: Further settings of `EngineConfig`, such as `dtype`.

    Raises:
        ConfigError: A value is out of range.
    """

    model: str
    prompts: Path
    speculators: tuple[Mapping[str, Any], ...] = DEFAULT_SPECULATORS
    kinds: tuple[str, ...] | None = None
    per_kind: int | None = None
    max_tokens: int = 64
    repeats: int = 3
    batch: int = 1
    threads: int | None = None
    chat_template: bool | None = None
    ignore_eos: bool = False
    peers: bool = True
    checkpoint: Path | None = None
    lookup_tokens: int = 10
    row_curve: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("per_kind", "max_tokens", "repeats", "batch", "threads", "lookup_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(name, value, "an integer >= 1")
        for name in ("model", "speculative_config", "max_num_seqs"):
            if name in self.engine:
                raise ConfigError(f"engine setting {name}", self.engine[name], "unset: the benchmark sets it")

    @property
    def speculator_names(self) -> tuple[str, ...]:
        """A short unique name of each speculator: its method, with its other fields where methods repeat."""
        methods = [str(config.get("method")) for config in self.speculators]
        names = [
            method if methods.count(method) == 1 else f"{method} {_fields(config)}"
            for method, config in zip(methods, self.speculators, strict=True)
        ]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("speculative_config", name, "given once")
        return tuple(names)


def _fields(config: Mapping[str, Any]) -> str:
    shown = {"num_speculative_tokens": "K"}
    return " ".join(f"{shown.get(key, key)}={value}" for key, value in config.items() if key != "method")
