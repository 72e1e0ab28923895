"""transformers' `generate`: plain greedy decoding and prompt lookup, on one loaded model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from specround.bench.variants import Role, Run, TokenIds
from specround.engine.build import load_module

if TYPE_CHECKING:
    from specround.models.causal_lm import CausalModel


class TransformersModel:
    """A model as transformers runs it.

    Args:
        checkpoint: Hugging Face directory to load. None = the weights as the engine reads them from its GGUF file;
            transformers would dequantise it to the same values.
        name: What the engine loaded.
        like: The engine's model: for its dtype and its end-of-sequence ids.
        device: Where it runs.
        max_tokens: Tokens per prompt, at most.
        ignore_eos: Generate `max_tokens` tokens whatever they are.
    """

    def __init__(
        self,
        checkpoint: Path | None,
        name: str,
        like: CausalModel,
        *,
        device: torch.device,
        max_tokens: int,
        ignore_eos: bool,
    ) -> None:
        self.eos_token_ids = () if ignore_eos else tuple(like.eos_token_ids)
        self.max_tokens, self.device = max_tokens, device
        with _quiet():
            self.module: Any = _read(name, like) if checkpoint is None else _loaded(checkpoint, like.dtype)
        self.module.to(device).eval()
        self.module.generation_config = GenerationConfig(**self._settings())

    def generation_config(self, lookup_tokens: int | None) -> Any:
        """Greedy decoding, with prompt lookup if it has a number of drafts."""
        lookup = {} if lookup_tokens is None else {"prompt_lookup_num_tokens": lookup_tokens}
        return GenerationConfig(**self._settings(), **lookup)

    def _settings(self) -> dict[str, Any]:
        return {
            "do_sample": False,
            "max_new_tokens": self.max_tokens,
            "eos_token_id": list(self.eos_token_ids) or None,
            "pad_token_id": self.eos_token_ids[0] if self.eos_token_ids else 0,
        }


class TransformersVariant:
    """`generate` of transformers.

    Args:
        model: The loaded model.
        lookup_tokens: Drafts of prompt lookup, which takes one prompt at a time; None = plain decoding.
    """

    def __init__(self, model: TransformersModel, lookup_tokens: int | None = None) -> None:
        self.name = "transformers" if lookup_tokens is None else f"transformers prompt lookup {lookup_tokens}"
        self.role: Role = "peer_plain" if lookup_tokens is None else "peer"
        self._model, self._config = model, model.generation_config(lookup_tokens)

    def run(self, prompts: Sequence[TokenIds]) -> Run:
        """Generate for some prompts at once, padded on the left."""
        module, longest = self._model.module, max(len(prompt) for prompt in prompts)
        pad = self._config.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        num_forwards = 0

        def count(*_: object) -> None:
            nonlocal num_forwards
            num_forwards += 1

        first = _FirstRound()
        hook = module.register_forward_hook(count)
        try:
            with torch.no_grad(), _quiet():
                started = time.perf_counter()
                output = module.generate(
                    ids.to(self._model.device),
                    attention_mask=mask.to(self._model.device),
                    generation_config=self._config,
                    stopping_criteria=[first],
                )
                generated = output[:, longest:].tolist()
                ended = time.perf_counter()
        finally:
            hook.remove()
        token_ids = tuple(self._until_end(tokens) for tokens in generated)
        return Run(
            token_ids=token_ids,
            seconds=ended - started,
            decode_seconds=ended - first.seconds,
            decode_tokens=sum(max(0, len(tokens) - (first.length - longest)) for tokens in token_ids),
            rounds=num_forwards * len(prompts),
        )

    def _until_end(self, tokens: list[int]) -> TokenIds:
        """A row without the padding after its last token."""
        for place, token in enumerate(tokens, 1):
            if token in self._model.eos_token_ids:
                return tuple(tokens[:place])
        return tuple(tokens)


class _FirstRound(StoppingCriteria):  # type: ignore[misc]
    """Notes when the first round was over and how long the rows were then; it stops nothing."""

    def __init__(self) -> None:
        self.seconds, self.length = 0.0, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        if not self.length:
            self.seconds, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _loaded(checkpoint: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=dtype, local_files_only=True)


def _read(name: str, like: CausalModel) -> Any:
    """A module of its own: the engine's has other attention, and its projections may be packed."""
    module = load_module(name, like.dtype)
    module.set_attn_implementation("sdpa")
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging and from drawing bars of its own."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
