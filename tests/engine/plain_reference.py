"""Plain decoding of a model, remembered, and the one rule by which another run may differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as hf_logging

from specround import LLM, SamplingParams
from specround.kernels.acceptance.philox import gumbel_noise

hf_logging.disable_progress_bar()

EXCUSED_GAP = 2e-4
"""A divergence is excused only where the two best scores are closer than this share of the largest logit."""
EXCUSED_SHARE = 1e-3


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True, detokenize=False
        )

    @property
    def as_prompt(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.prompt)}


@dataclass
class Tally:
    """Tokens compared and divergences excused."""

    compared: int = 0
    excused: int = 0

    def check(self, least: int = 1) -> None:
        """Something was compared, and the excused share is below the contract's."""
        assert self.compared >= least, "nothing was compared"
        assert self.excused <= EXCUSED_SHARE * self.compared, f"{self.excused} of {self.compared} tokens diverge"


class PlainReference:
    """A checkpoint, what plain decoding makes of it, and the Hugging Face module."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._known: dict[tuple[tuple[int, ...], float, int], tuple[int, ...]] = {}

    @cached_property
    def plain(self) -> LLM:
        """Plain decoding, in time, with room for everything."""
        return LLM(self.path, async_scheduling=False, max_num_seqs=64, max_num_batched_tokens=4096)

    @cached_property
    def module(self) -> LlamaForCausalLM:
        """The same checkpoint as transformers runs it."""
        return LlamaForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def answers(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """What plain decoding generates; a request is run once and cut where less is asked for."""
        new = [ask for ask in asks if len(self._known.get(_key(ask), ())) < ask.max_tokens]
        if new:
            outputs = self.plain.generate([ask.as_prompt for ask in new], [ask.params for ask in new])
            self._known |= {
                _key(ask): tuple(output.outputs[0].token_ids) for ask, output in zip(new, outputs, strict=True)
            }
        return [self._known[_key(ask)][: ask.max_tokens] for ask in asks]

    def compare(self, ask: Ask, tokens: Sequence[int], tally: Tally, *, whole: bool = True) -> None:
        """Tokens must be the plain ones up to an excused divergence; after one, nothing can be compared.

        Args:
            ask: The request.
            tokens: What some engine generated.
            tally: Counts.
            whole: The request was not cut short, so the lengths must agree too.
        """
        plain = self.answers([ask])[0]
        assert len(tokens) <= len(plain)
        assert not whole or len(tokens) == len(plain), f"{len(tokens)} tokens instead of {len(plain)}"
        for place, (ours, theirs) in enumerate(zip(tokens, plain, strict=False)):
            if ours != theirs:
                gap, largest = self._gap(ask, plain[:place])
                shown = (
                    f"{ask}: token {place} is {ours} instead of {theirs}; gap {gap:.2e}, largest logit {largest:.2f}"
                )
                assert gap <= EXCUSED_GAP * largest, shown
                tally.excused += 1
                return
            tally.compared += 1

    @torch.no_grad()
    def _gap(self, ask: Ask, generated: tuple[int, ...]) -> tuple[float, float]:
        """Distance of the two best final scores, noise included, and the largest logit."""
        known = [*ask.prompt, *generated]
        logits = self.module(input_ids=torch.tensor([known])).logits[0, -1].float()
        if ask.temperature > 0:
            logits = logits / ask.temperature
        scores = logits
        if ask.temperature > 0:
            scores = logits + gumbel_noise(torch.tensor([ask.seed]), torch.tensor([len(known)]), logits.shape[0])[0]
        best = scores.topk(2).values
        return float(best[0] - best[1]), float(logits.abs().max())


def check_at_rest(llm: LLM) -> None:
    """Every block and slot is back, no request is left, nothing is in flight."""
    core = llm.engine.core
    scheduler = core.scheduler
    assert scheduler.pool.num_free == scheduler.pool.num_total, "blocks leaked"
    assert sorted(scheduler._free_slots) == list(range(scheduler.limits.max_num_seqs)), "slots leaked"
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.request_ids
    assert not scheduler._in_flight, "steps are remembered that are over"
    assert not llm._inboxes, "requests are routed that are over"
    assert not core.has_work
    null = llm.config.block_size
    assert not any(bool(tensor[:, :null].any()) for tensor in core.runner.cache.tensors), "the null block was written"


def _key(ask: Ask) -> tuple[tuple[int, ...], float, int]:
    return ask.prompt, ask.temperature, ask.seed
