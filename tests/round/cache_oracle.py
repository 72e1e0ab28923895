"""The cache oracle: what `transformers` itself stores for a request's tokens, against what the engine's slots hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging as hf_logging

from specround import LLM, SamplingParams

hf_logging.disable_progress_bar()

TOLERANCE = 1e-4
"""Largest error of a cache entry, relative to the largest entry of its layer."""


class Reference:
    """A checkpoint and the Hugging Face module that runs it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.module = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def caches(self, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[n, heads, dim]` of every layer after these tokens."""
        cache = self.module(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
        return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


@dataclass
class Comparison:
    """What a run found.

    Attributes:
        worst: Largest error of a cache entry.
        compared: Committed slots that were compared, summed over steps.
        tree_moves: Accepted rows that did not stand in their chain slot and had to be moved there.
    """

    worst: float = 0.0
    compared: int = 0
    tree_moves: int = 0

    def check(self, *, least: int = 1) -> None:
        """Something was compared, and nothing was worse than the tolerance."""
        assert self.compared >= least, "nothing was compared"
        assert self.worst <= TOLERANCE, self


def params(temperature: float, tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)


def plain_answers(
    target: Reference, prompts: list[list[int]], params: list[SamplingParams], max_model_len: int
) -> list[list[int]]:
    """What plain decoding generates, one prompt at a time."""
    llm = LLM(target.path, max_model_len=max_model_len, block_size=16)
    answers = []
    for prompt, param in zip(prompts, params, strict=True):
        answers += llm.generate([{"prompt_token_ids": prompt}], param)
    return [answer.outputs[0].token_ids for answer in answers]


def run_and_compare(
    llm: LLM,
    references: list[Reference],
    prompts: list[list[int]],
    sampling: list[SamplingParams],
) -> tuple[list[list[int]], Comparison]:
    """Generate step by step; after every step compare each live request's slots in every layer with the references.

    Args:
        llm: Fresh engine that records rounds.
        references: Target, then drafters, in the order of their layers in the cache.
        prompts: Token ids.
        sampling: One for each.
    """
    core, found = llm.engine.core, Comparison()
    outputs: dict[str, list[int]] = {}
    for i, (prompt, param) in enumerate(zip(prompts, sampling, strict=True)):
        _, ids = llm._inputs.tokenise({"prompt_token_ids": prompt})
        core.add(llm._inputs.build(str(i), ids, param, 0))
        outputs[str(i)] = []
    while core.has_work:
        for update in core.step():
            outputs[update.request_id] += update.new_token_ids
            if update.trace is not None:
                found.tree_moves += sum(column != place for place, column in enumerate(update.trace.path))
        compare_live(core, references, found)
    pool = core.scheduler.pool
    assert pool.num_free == pool.num_total, "blocks leaked"
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    null = core.runner.cache.tensors[0][:, : llm.config.block_size]
    assert not null.any(), "the null block was written"
    return [outputs[str(i)] for i in range(len(prompts))], found


def compare_live(core: Any, references: list[Reference], found: Comparison) -> None:
    """Compare every live request's committed slots, as the device's own counts and tables name them."""
    state, cache = core.runner.state, core.runner.cache
    size = state.block_size
    for request in core.scheduler.running:
        count = int(state.num_computed_tokens[request.req_idx])
        if count == 0:
            continue
        tokens = state.token_history[request.req_idx, :count].tolist()
        index = torch.arange(count)
        slots = state.block_tables[request.req_idx, index // size] * size + index % size
        assert (slots >= size).all(), "a live token in the null block"
        held = iter(cache.layers)
        for reference in references:
            for expected in reference.caches(tokens):
                for ours, theirs in zip(next(held), expected, strict=True):
                    error = float((ours[slots] - theirs).abs().max() / theirs.abs().max())
                    found.worst = max(found.worst, error)
        found.compared += count
