"""transformers' `generate`: plain greedy decoding and prompt lookup, on one loaded model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from specround.bench.settings import PeerCheckpoint
from specround.bench.variants import Role, Run, TokenIds


class TransformersModel:
    """A model loaded by transformers.

    Args:
        checkpoint: Its files.
        dtype: Type of the weights.
        device: Where it runs.
        eos_token_ids: Ids that end a text; empty to ignore them.
        max_tokens: Tokens per prompt, at most.
    """

    def __init__(
        self,
        checkpoint: PeerCheckpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        eos_token_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.eos_token_ids, self.max_tokens, self.device = tuple(eos_token_ids), max_tokens, device
        files = {} if checkpoint.gguf_file is None else {"gguf_file": checkpoint.gguf_file}
        with _quiet():
            self.module: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint.directory), dtype=dtype, **files)
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
        forwards: list[float] = []
        hook = module.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
        try:
            with torch.no_grad(), _quiet():
                started = time.perf_counter()
                output = module.generate(
                    ids.to(self._model.device),
                    attention_mask=mask.to(self._model.device),
                    generation_config=self._config,
                )
                generated = output[:, longest:].tolist()
                ended = time.perf_counter()
        finally:
            hook.remove()
        token_ids = tuple(self._until_end(tokens) for tokens in generated)
        return Run(
            token_ids=token_ids,
            seconds=ended - started,
            decode_seconds=ended - forwards[0],
            decode_tokens=sum(len(tokens) - 1 for tokens in token_ids),
            rounds=len(forwards) * len(prompts),
        )

    def _until_end(self, tokens: list[int]) -> TokenIds:
        """A row without the padding after its last token."""
        for place, token in enumerate(tokens, 1):
            if token in self._model.eos_token_ids:
                return tuple(tokens[:place])
        return tuple(tokens)


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
