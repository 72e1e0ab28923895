"""Engines in processes of their own, and what plain vLLM generates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

VOCAB = 24
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}
Ask = dict[str, Any]


def run_engine(folder: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run `one_engine.py` and read what it printed."""
    given, made = folder / f"{name}.job.json", folder / f"{name}.result.json"
    given.write_text(json.dumps(job))
    command = [sys.executable, str(Path(__file__).with_name("one_engine.py")), str(given), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(made.read_text())


@dataclass(frozen=True)
class Target:
    """A checkpoint, requests, and what plain vLLM makes of them."""

    folder: Path
    model: str
    asks: list[Ask]
    vocab_size: int
    drafter: str = ""

    @cached_property
    def plain(self) -> list[list[int]]:
        """Tokens of stock vLLM without speculation and without any class of ours."""
        return run_engine(self.folder, "plain", self.job(None))["tokens"][0]

    def job(self, speculative: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
        return {"model": self.model, "engine": ENGINE, "speculative": speculative, "batches": [self.asks]} | others

    def config(self, name: str) -> dict[str, Any]:
        """The speculative config of a speculator under test."""
        answers = self.folder / "answers.json"
        if name.startswith("adversarial"):
            answers.write_text(
                json.dumps([[ask["prompt"], made] for ask, made in zip(self.asks, self.plain, strict=True)])
            )
        adversarial = {"method": "adversarial_from_file", "answers_file": str(answers), "vocab_size": self.vocab_size}
        members = {
            "ngram": {"method": "ngram", "num_speculative_tokens": 5},
            "suffix_tree": {"method": "suffix_tree", "suffix_decoding_max_spec_factor": 4.0},
            "recall": {"method": "recall"},
            "self_draft": {"method": "draft_model", "model": self.model},
            "self_tree": {"method": "draft_model", "model": self.model, "max_branching": 2},
            "foreign_tree": {"method": "draft_model", "model": self.drafter, "max_branching": 3},
            "adversarial": adversarial,
            "adversarial_mask": adversarial | {"use_masks": True},
            "adversarial_on_triton": adversarial | {"method": "adversarial_on_triton", "use_masks": True},
        }
        return {"num_speculative_tokens": 9} | members[name]

    def run(self, name: str, speculative: dict[str, Any], **others: Any) -> dict[str, Any]:
        return run_engine(self.folder, name, self.job(speculative, **others))


def make_asks(vocab_size: int, count: int = 7) -> list[Ask]:
    """More requests than run at once, with prompts longer than a step and outputs of mixed lengths, one of them 1."""
    rng = random.Random(0)
    lengths = [30, 12, 25, 5, 30, 1, 18]
    return [
        {
            "prompt": [rng.randrange(vocab_size) for _ in range(3 + 9 * i)],
            "max_tokens": lengths[i % len(lengths)],
            "temperature": 0.0,
        }
        for i in range(count)
    ]
