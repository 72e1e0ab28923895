"""Results that arrive one step late change nothing that a user sees."""

from __future__ import annotations

import pytest
from plain_reference import PlainReference, check_at_rest

from specround import LLM, SamplingParams

PROMPTS = ["the", "in the morning", "one and two and one and two and", "x" * 20, "a: b, a: b, a:"]


def outcome(llm: LLM, params: list[SamplingParams]) -> list[tuple[object, ...]]:
    outputs = llm.generate(PROMPTS, params)
    check_at_rest(llm)
    return [
        (
            output.outputs[0].token_ids,
            output.outputs[0].text,
            output.outputs[0].finish_reason,
            output.outputs[0].stop_reason,
            output.metrics.committed,
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "suffix_tree", "num_speculative_tokens": 7},
        {"method": "draft_model", "num_speculative_tokens": 6, "max_branching": 2},
        {"method": "recall", "num_speculative_tokens": 6},
    ],
    ids=lambda config: "plain" if config is None else config["method"],
)
def test_same_outcome_late_and_in_time(config: dict[str, object] | None, speaking: PlainReference) -> None:
    """Tokens, text, reasons and committed counts agree, with stops of every kind and a pool that runs out."""
    if config is not None and config["method"] == "draft_model":
        config = config | {"model": speaking.path}
    params = [
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=0.8, seed=1, max_tokens=30, stop=["e", "the "]),
        SamplingParams(temperature=0, max_tokens=17, stop_token_ids=list(range(40, 60))),
        SamplingParams(temperature=0.8, seed=2, max_tokens=40, include_stop_str_in_output=True, stop="t"),
        SamplingParams(temperature=1.3, seed=3, max_tokens=25, ignore_eos=True),
    ]
    seen = []
    for late in (False, True):
        llm = LLM(
            speaking.path,
            config,
            async_scheduling=late,
            max_model_len=80,
            block_size=4,
            num_blocks=24,
            max_num_seqs=4,
            max_num_batched_tokens=24,
        )
        seen.append(outcome(llm, params))
    assert seen[0] == seen[1]
    assert len({reason for _, _, reason, _, _ in seen[0]}) == 2, "both stops and lengths were meant to occur"


def test_results_are_really_late(speaking: PlainReference) -> None:
    """The switch works: the second step is scheduled before the first one's tokens are delivered."""
    delivered = {}
    for late in (False, True):
        llm = LLM(speaking.path, async_scheduling=late)
        core = llm.engine.core
        core.add(llm._inputs.build("a", (5, 6), SamplingParams(temperature=0, max_tokens=4), 0))
        delivered[late] = [len(core.step()) for _ in range(2)]
    assert delivered == {False: [1, 1], True: [0, 1]}
