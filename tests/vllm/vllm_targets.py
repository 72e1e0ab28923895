"""Engines in processes of their own, and what plain vLLM generates."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

VOCAB = 24
ENGINE = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM reads from the environment in the tests."""
Ask = dict[str, Any]


class Engines:
    """A process that has imported vLLM and forks for each engine that is to run."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, folder: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job in a fork of the process, and read its result."""
        given, made, log = (folder / f"{name}.{kind}" for kind in ("job.json", "result.json", "log"))
        given.write_text(json.dumps(job))
        made.unlink(missing_ok=True)
        server = self._start()
        server.stdin.write(json.dumps([str(given), str(made), str(log)]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        said = log.read_text()[-4000:] if log.exists() else "the process that imports vLLM ended"
        assert status == "0", f"engine {name}: status {status or 'none'}\n{said}"
        return json.loads(made.read_text())

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.communicate()
            self._server = None

    def _start(self) -> subprocess.Popen[str]:
        if self._server is None:
            command = [sys.executable, str(Path(__file__).with_name("one_engine.py"))]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | QUIET)
        return self._server


ENGINES = Engines()


@dataclass(frozen=True)
class Target:
    """A checkpoint, requests, and what plain vLLM makes of them."""

    folder: Path
    model: str
    asks: list[Ask]
    vocab_size: int
    drafter: str = ""
    with_tokenizer: bool = False

    @cached_property
    def plain_run(self) -> dict[str, Any]:
        """What stock vLLM makes of the requests without speculation and without any class of ours."""
        return ENGINES.run(self.folder, "plain", self.job(None))

    @property
    def plain(self) -> list[list[int]]:
        """Its tokens."""
        return self.plain_run["tokens"][0]

    def job(self, speculative: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
        given = {"model": self.model, "with_tokenizer": self.with_tokenizer, "engine": ENGINE}
        return given | {"speculative": speculative, "batches": [self.asks]} | others

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
        return ENGINES.run(self.folder, name, self.job(speculative, **others))


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
