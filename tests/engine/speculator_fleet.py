"""Every speculator under test by a short name, and the requests it is tested with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plain_reference import Ask, PlainReference

MAX_MODEL_LEN = 48
VOCAB = 24

FLEET = (
    "ngram",
    "suffix_tree",
    "suffix_chain",
    "suffix_cached",
    "self_draft",
    "foreign_draft",
    "short_draft",
    "self_tree",
    "foreign_tree",
    "recall",
    "adversarial",
    "adversarial_mask",
)
TREES = ("suffix_tree", "suffix_cached", "self_tree", "foreign_tree", "recall", "adversarial", "adversarial_mask")
ACCEPTS_ALL = ("self_draft", "short_draft")
"""Chains of the target's own tokens, cut at the drafter's context: every draft must be accepted, sampled or not."""
MUST_ACCEPT = tuple(name for name in FLEET if not name.startswith("foreign"))


@dataclass(frozen=True)
class Models:
    """Checkpoints the fleet needs."""

    target: PlainReference
    foreign: str
    short_context: str

    def config(self, name: str, drafts: int, asks: Sequence[Ask] = ()) -> dict[str, Any]:
        """`speculative_config` of a member of the fleet with K = `drafts`."""
        answers = dict(zip((ask.prompt for ask in asks), self.target.answers(asks), strict=True))
        width = min(2 if name == "self_tree" else 3, drafts)
        adversarial = {"method": "adversarial", "vocab_size": VOCAB, "answers": answers, "seed": drafts}
        members: dict[str, Mapping[str, Any]] = {
            "ngram": {"method": "ngram"},
            "suffix_tree": {"method": "suffix_tree", "suffix_decoding_max_spec_factor": 4.0},
            "suffix_chain": {"method": "suffix_tree", "max_branching": 1, "suffix_decoding_max_spec_factor": 4.0},
            "suffix_cached": {"method": "suffix_tree", "suffix_decoding_max_cached_requests": 4},
            "self_draft": {"method": "draft_model", "model": self.target.path},
            "foreign_draft": {"method": "draft_model", "model": self.foreign},
            "short_draft": {"method": "draft_model", "model": self.short_context},
            "self_tree": {"method": "draft_model", "model": self.target.path, "max_branching": width},
            "foreign_tree": {"method": "draft_model", "model": self.foreign, "max_branching": width},
            "recall": {"method": "recall", "branches": width},
            "adversarial": adversarial,
            "adversarial_mask": adversarial | {"use_masks": True},
        }
        return {**members[name], "num_speculative_tokens": drafts}


def workload(drafts: int) -> list[Ask]:
    """Prompts of 1 to 2K + 2 tokens and at the context limit, greedy and sampled, with outputs of mixed lengths.

    Prompts are distinct, so that the adversarial speculator can tell requests apart by them.
    """
    rng = random.Random(1)
    lengths = list(range(1, 2 * drafts + 3))
    edge = {1, 2, 3, drafts, drafts + 1, drafts + 2}
    lengths += [MAX_MODEL_LEN - left for left in sorted(edge)]
    asks: dict[tuple[int, ...], Ask] = {}
    for place, length in enumerate(lengths):
        for temperature in (0.0, 0.8) if drafts < 15 else ((0.0, 0.8)[place % 2],):
            prompt = _prompt(rng, length)
            while prompt in asks:
                prompt = _prompt(rng, length)
            lengths_of_outputs = (1, 2, drafts, drafts + 1, 2 * drafts + 2, 12) if drafts < 15 else (1, 2, 3, 14)
            wanted = lengths_of_outputs[len(asks) % len(lengths_of_outputs)]
            room = min(wanted, 14, MAX_MODEL_LEN - length)
            asks[prompt] = Ask(prompt, room, temperature, seed=len(asks) + (len(asks) % 3) * 2**62)
    return list(asks.values())


def _prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    """Random tokens, or a random motif repeated."""
    motif = [rng.randrange(3, VOCAB) for _ in range(rng.choice((length, min(length, 3))))]
    return tuple(motif[i % len(motif)] for i in range(length))
