"""`EngineConfig`: every setting of the embedded engine, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from specround.contract import ConfigError
from specround.kernels.state_rows import StateMode
from specround.models.linear import Quantization

MAX_SETTING: Final = {
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 1 << 20,
    "block_size": 4096,
    "num_blocks": 1 << 24,
    "num_state_blocks": 1 << 24,
}
"""The largest value of each count. Nothing larger is of use, and sizes derived from these stay representable."""

MAX_NUM_DRAFTS: Final = 4096
"""The most drafts per request and round of any speculator; trees have at most 63."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings as the user gave them; None = chosen when the model is known.

    Attributes:
        model: Local directory, `.gguf` file, alias or hub id.
        speculative_config: `{"method": ..., "num_speculative_tokens": K, ...}` or None for plain decoding.
        dtype: "auto" (float32 on a CPU, bfloat16 on a GPU), "float32", "bfloat16" or "float16".
        quantization: Packs the projections on a CPU. "int8" and "int4": weights only, computing in bfloat16. "w8a8":
            weights and activations of 8 bits, the rest as `dtype` says. None = nothing is packed.
        max_model_len: Longest request, prompt and output, in tokens; None = the model's own limit, or with the rotary
            kind "longrope" its original length, which requests should not exceed unless you know that they may.
        max_num_seqs: Most requests that run at once, at most 4096.
        max_num_batched_tokens: Most rows of one step, at most 2^20; longer prompts are prefilled in chunks.
        block_size: Tokens per KV block, at most 4096.
        kv_cache_memory_bytes: Memory of the KV pool. Give this or `num_blocks`.
        num_blocks: Usable blocks of the KV pool, at most 2^24.
        state_mode: How recurrent layers keep the states of drafts: "replay" keeps their inputs, "slots" the states.
        num_state_blocks: Usable blocks of recurrent states, at most 2^24; a request holds one, in mode "slots" one for
            each candidate. None = enough for `max_num_seqs` requests.
        seed: Seeds the requests that bring no seed of their own.
        device: "auto", "cpu" or "cuda".
        async_scheduling: Results reach the scheduler one step late, so that the next step is scheduled while the device
            works. None = on a GPU.
        check_values: Check plans and results by value. None = on a CPU; elsewhere reading values waits for the device.
        cuda_graphs: Capture decode rounds in CUDA graphs and replay them. Only on a GPU; models with experts only in
            bfloat16, as torch's grouped matrix products wait for the device in other types.
        record_rounds: Keep each round's tree and path for display.

    Raises:
        ConfigError: A value is out of range.
    """

    model: str
    speculative_config: Mapping[str, Any] | None = None
    dtype: str = "auto"
    quantization: Quantization | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    state_mode: StateMode = "replay"
    num_state_blocks: int | None = None
    seed: int = 0
    device: str = "auto"
    async_scheduling: bool | None = None
    check_values: bool | None = None
    cuda_graphs: bool = False
    record_rounds: bool = False

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """Settings by keyword.

        Raises:
            ConfigError: An unknown setting, listing the known ones; or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(name, value, f"one of the settings {', '.join(known)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model", self.model, "a directory, a .gguf file, an alias or a hub id")
        self._check_switches()
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_count(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_blocks", "num_state_blocks"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len", self.max_model_len, "at least 2: one prompt token and one generated")
        if self.kv_cache_memory_bytes is not None and self.num_blocks is not None:
            raise ConfigError("num_blocks", self.num_blocks, "None when kv_cache_memory_bytes is given")
        if self.max_num_batched_tokens < self.max_num_seqs:
            allowed = f"at least max_num_seqs={self.max_num_seqs}: every running request needs a row"
            raise ConfigError("max_num_batched_tokens", self.max_num_batched_tokens, allowed)
        if self.quantization not in (None, "int8", "int4", "w8a8"):
            raise ConfigError("quantization", self.quantization, "None, 'int8', 'int4' or 'w8a8'")
        if self.quantization in ("int8", "int4") and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError("dtype", self.dtype, f"'bfloat16' or 'auto' with quantization={self.quantization!r}")
        if self.state_mode not in ("replay", "slots"):
            raise ConfigError("state_mode", self.state_mode, "'replay' or 'slots'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError("seed", self.seed, "an integer")
        if self.speculative_config is not None and not isinstance(self.speculative_config, Mapping):
            raise ConfigError("speculative_config", self.speculative_config, "a mapping or None")

    def _check_switches(self) -> None:
        for name in ("cuda_graphs", "record_rounds"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True or False")
        for name in ("async_scheduling", "check_values"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True, False or None")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, value, "an integer >= 1")
    if name in MAX_SETTING and value > MAX_SETTING[name]:
        raise ConfigError(name, value, f"at most {MAX_SETTING[name]}")
