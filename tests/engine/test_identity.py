"""Tokens do not depend on speculation: the fleet against plain decoding, over every setting that shapes a step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest
from plain_reference import Ask, PlainReference, Tally, check_at_rest
from speculator_fleet import ACCEPTS_ALL, FLEET, MAX_MODEL_LEN, MUST_ACCEPT, Models, workload

from specround import LLM, RequestOutput


@dataclass(frozen=True)
class Case:
    """One engine."""

    speculator: str
    drafts: int
    late: bool
    block_size: int
    tight_pool: bool
    batched_tokens: int
    num_seqs: int

    @property
    def settings(self) -> dict[str, object]:
        blocks = -(-MAX_MODEL_LEN // self.block_size)
        return {
            "max_model_len": MAX_MODEL_LEN,
            "async_scheduling": self.late,
            "block_size": self.block_size,
            "num_blocks": 2 * blocks if self.tight_pool else blocks * self.num_seqs,
            "max_num_batched_tokens": self.batched_tokens,
            "max_num_seqs": self.num_seqs,
        }

    @property
    def label(self) -> str:
        late, pool = "late" if self.late else "in-time", "tight" if self.tight_pool else "roomy"
        return (
            f"{self.speculator}-K{self.drafts}-{late}-b{self.block_size}-{pool}-t{self.batched_tokens}-s{self.num_seqs}"
        )


DRAFTS, LATE, BLOCK_SIZES, TIGHT, BATCHED, SEQS = (
    (1, 3, 7, 15),
    (False, True),
    (1, 4, 16),
    (False, True),
    (12, 256),
    (4, 12),
)
EVERY = [Case(*values) for values in product(FLEET, DRAFTS, LATE, BLOCK_SIZES, TIGHT, BATCHED, SEQS)]


def covering() -> list[Case]:
    """A part of the product in which every pair of values of two settings occurs, every speculator with every K."""
    rng = random.Random(0)

    def pairs(case: Case) -> set[tuple[int, object, int, object]]:
        values = (case.speculator, case.drafts, case.late, case.block_size, case.tight_pool, case.batched_tokens)
        values = (*values, case.num_seqs)
        return {(i, values[i], j, values[j]) for i in range(len(values)) for j in range(i)}

    missing = set().union(*(pairs(case) for case in EVERY))
    chosen = []
    while missing:
        case = max(rng.sample(EVERY, 400), key=lambda each: len(pairs(each) & missing))
        if gained := pairs(case) & missing:
            missing -= gained
            chosen.append(case)
    return chosen


def run_case(case: Case, models: Models) -> list[RequestOutput]:
    """Run the workload, compare every token, and check that the engine is empty afterwards."""
    asks = workload(case.drafts)
    llm = LLM(models.target.path, models.config(case.speculator, case.drafts, asks), **case.settings)
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    tally = Tally()
    for ask, output in zip(asks, outputs, strict=True):
        check_output(models.target, ask, output, tally)
    tally.check()
    check_at_rest(llm)
    return outputs


def check_output(target: PlainReference, ask: Ask, output: RequestOutput, tally: Tally) -> None:
    tokens, metrics = output.outputs[0].token_ids, output.metrics
    target.compare(ask, tokens, tally)
    assert output.outputs[0].finish_reason == "length"
    assert metrics.committed == len(tokens)
    assert metrics.accepted <= metrics.drafted
    assert metrics.rounds + metrics.accepted >= metrics.committed


@pytest.mark.parametrize("case", covering(), ids=lambda case: case.label)
def test_tokens_equal_plain_decoding(case: Case, models: Models) -> None:
    """A covering part of the product: tokens are the plain ones, nothing leaks, and drafts really were accepted."""
    outputs = run_case(case, models)
    drafted = sum(output.metrics.drafted for output in outputs)
    accepted = sum(output.metrics.accepted for output in outputs)
    assert drafted > 0
    if case.speculator in MUST_ACCEPT:
        assert accepted > 0
    if case.speculator in ACCEPTS_ALL:
        assert accepted == drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.label)
def test_tokens_equal_plain_decoding_everywhere(case: Case, models: Models) -> None:
    """The whole product of speculators, K, delivery, block sizes, pools, token budgets and batch sizes."""
    run_case(case, models)
