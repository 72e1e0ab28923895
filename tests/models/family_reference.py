"""The reference of a family: transformers' own eager attention, its keys and values, logits and router gaps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixer_reference
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from specround import LLM, SamplingParams
from specround.models.families import FAMILIES

ABSENT = sorted(name for name, family in FAMILIES.items() if not hasattr(transformers, family.config_class))
"""Types that the installed transformers is too old for."""
KNOWN = sorted(set(FAMILIES) - set(ABSENT))
ATTENTION_ONLY = [name for name in KNOWN if not FAMILIES[name].recurrent]
RECURRENT = [name for name in KNOWN if FAMILIES[name].recurrent]
ROUTER_GAP = 2e-4
"""A difference is excused only where two experts' selection scores are closer than this share of the largest."""

_recorded: list[tuple[Tensor, Tensor]] = []


def _recording_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the module's own file; keys and values are what its cache holds."""
    import sys

    _recorded.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, *args, **kwargs)


AttentionInterface.register("recording_eager", _recording_attention)
AttentionMaskInterface.register("recording_eager", eager_mask)


@dataclass(frozen=True)
class Run:
    """One forward of a whole sequence.

    Attributes:
        logits: `[n, V]`.
        caches: Keys and values `[n, heads, dim]` of every layer.
        router_gap: Smallest distance between a chosen and a rejected expert's score, as a share of the largest score.
    """

    logits: Tensor
    caches: list[tuple[Tensor, Tensor]]
    router_gap: float


class FamilyReference:
    """A checkpoint and the Hugging Face module that runs it; runs of known sequences answer for their prefixes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        config = transformers.AutoConfig.from_pretrained(path)
        self.model_type = config.model_type
        self.module = self._load()
        self._runs: dict[tuple[int, ...], Run] = {}
        self._plain: dict[tuple[Any, ...], list[int]] = {}
        self._gaps: list[float] = []

    @torch.no_grad()
    def run(self, tokens: list[int]) -> Run:
        """A forward of the whole sequence with eager attention."""
        key = tuple(tokens)
        if key not in self._runs:
            _recorded.clear()
            self._gaps = []
            self.module.set_attn_implementation("recording_eager")
            logits = self.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            self.module.set_attn_implementation("eager")
            self._runs[key] = Run(logits, list(_recorded), min(self._gaps, default=float("inf")))
        return self._runs[key]

    def prefix(self, tokens: list[int]) -> Run:
        """A run that begins with these tokens: an earlier one if there is one."""
        key = tuple(tokens)
        for known, run in self._runs.items():
            if known[: len(key)] == key:
                return run
        return self.run(tokens)

    def remember(self, tokens: list[int], logits: Tensor, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Answer for a sequence and its prefixes with a run made elsewhere."""
        self._runs[tuple(tokens)] = Run(logits, caches, float("inf"))

    @torch.no_grad()
    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedy `generate` of transformers."""
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = self.module.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[0, len(prompt) :].tolist()

    def plain(self, prompts: list[list[int]], params: list[SamplingParams], max_model_len: int) -> list[list[int]]:
        """What plain decoding generates, one prompt at a time, remembered."""
        keys = [(tuple(p), s.temperature, s.seed, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
        if any(key not in self._plain for key in keys):
            llm = LLM(self.path, max_model_len=max_model_len, block_size=16)
            for key, prompt, param in zip(keys, prompts, params, strict=True):
                self._plain[key] = llm.generate([{"prompt_token_ids": prompt}], param)[0].outputs[0].token_ids
        return [self._plain[key] for key in keys]

    def _load(self) -> Any:
        model_class = getattr(transformers, FAMILIES[self.model_type].model_class)
        loaded = model_class.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()
        for module in loaded.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(self._watch_router)
        return loaded

    def _watch_router(self, router: Any, _: Any, output: Any) -> None:
        scores = output[0].float()
        if hasattr(router, "e_score_correction_bias"):
            scores = scores.sigmoid() + router.e_score_correction_bias
            groups = scores.view(scores.shape[0], router.num_group, -1).topk(2, -1)[0].sum(-1)
            self._gaps.append(_gap(groups, router.topk_group))
            inside = groups >= groups.topk(router.topk_group, -1)[0][:, -1:]
            wide = inside.repeat_interleave(scores.shape[1] // groups.shape[1], 1)
            scores = scores.masked_fill(~wide, -1.0)
        self._gaps.append(_gap(scores, router.top_k))


class RecurrentReference(FamilyReference):
    """A model whose recurrent modules step token by token as `mixer_reference` says; the rest is transformers'.

    Attributes:
        original: transformers' own model of the same checkpoint, with its own recurrent modules.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.original, self.module = self.module, self._load()
        mixer_reference.install(self.module)

    @torch.no_grad()
    def generate(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Greedy `generate` of transformers."""
        changed, self.module = self.module, self.original
        try:
            return super().generate(prompt, max_new_tokens)
        finally:
            self.module = changed

    @property
    def has_group_norm(self) -> bool:
        """Whether transformers' gated norm is the original one: per group."""
        norms = [getattr(part, "norm", None) for part in self.original.modules() if hasattr(part, "A_log")]
        groups = [
            part.n_groups for part in self.original.modules() if hasattr(part, "A_log") and hasattr(part, "n_groups")
        ]
        return not groups or max(groups) == 1 or any(hasattr(n, "group_size") or hasattr(n, "n_groups") for n in norms)


def _gap(scores: Tensor, chosen: int) -> float:
    if chosen == scores.shape[-1]:
        return float("inf")
    best = scores.topk(chosen + 1, -1)[0]
    return float((best[:, chosen - 1] - best[:, chosen]).min() / scores.abs().max())
