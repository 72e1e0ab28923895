"""What one-token decoding leaves in every recurrent state and KV slot of a model, after each number of tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specround import LLM, SamplingParams
from specround.engine.core import EngineCore
from tiny_models import tiny_model

MAX_LEN = 64
Leaf = tuple[str, Tensor]
"""Name and contents of one state, or of the keys or values of one layer's slots."""


class HybridReference:
    """One checkpoint and a plain engine that decodes given tokens one at a time.

    Args:
        path: The checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._decoder = LLM(self.path, max_model_len=MAX_LEN, max_num_seqs=1, block_size=16)
        self._plain = LLM(self.path, max_model_len=MAX_LEN, max_num_seqs=4)
        self._left: dict[tuple[int, ...], list[Leaf]] = {}

    def plain(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
        """What plain decoding generates."""
        asks = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self._plain.generate(asks, sampling)]

    def left_by(self, tokens: list[int]) -> list[Leaf]:
        """States and KV after decoding some tokens one at a time."""
        if tuple(tokens) not in self._left:
            self._decode(tokens)
        return self._left[tuple(tokens)]

    def _decode(self, tokens: list[int]) -> None:
        """Decode tokens that are given: each is written over the one that was generated."""
        core = self._decoder.engine.core
        sampling = SamplingParams(temperature=0, max_tokens=MAX_LEN - 1, ignore_eos=True)
        _, ids = self._decoder._inputs.tokenise({"prompt_token_ids": tokens[:1]})
        core.add(self._decoder._inputs.build("reference", ids, sampling, 0))
        for count in range(1, len(tokens) + 1):
            core.step()
            request = core.scheduler.running[0]
            self._left.setdefault(tuple(tokens[:count]), leaves(core, request.req_idx, count))
            if count < len(tokens):
                core.runner.state.token_history[request.req_idx, count] = tokens[count]
        core.abort(["reference"])
        while core.has_work:
            core.step()


class Hybrids:
    """References by model type.

    Args:
        directory: Where the checkpoints are written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[str, HybridReference] = {}

    def __getitem__(self, model_type: str) -> HybridReference:
        if model_type not in self._made:
            self._made[model_type] = HybridReference(tiny_model(self._directory / model_type, model_type))
        return self._made[model_type]


def leaves(core: EngineCore, req_idx: int, count: int) -> list[Leaf]:
    """A request's committed states and its first `count` KV slots, copied; nothing may be pending."""
    runner = core.runner
    assert runner.states is not None
    block = int(runner.states.tables.blocks[req_idx, 0])
    assert block > 0, "a running request has a state block"
    found = []
    for layer in runner.states.layers:
        found += [(f"{layer.name}.{name}", cache[block].clone()) for name, cache in layer.caches()]
    index, size = torch.arange(count), runner.state.block_size
    slots = runner.state.block_tables[req_idx, index // size] * size + index % size
    for place, pair in enumerate(runner.cache.layers[: len(runner.model.layers)]):
        found += [
            (f"kv {place}.{name}", cache[slots].clone()) for name, cache in zip(("key", "value"), pair, strict=True)
        ]
    return found
