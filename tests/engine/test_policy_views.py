"""What policies are shown of the scheduler, in numbers worked out by hand; and how long a round is said to take."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from plain_reference import Ask, PlainReference
from scripted import scripted

from specround import LLM, BudgetView, SpecResources
from specround.contract import RoundStats

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
BLOCKS, SIZE, K = 40, 4, 3
ASKS = [Ask((3 + n, 4, 5, 6, 7), 6) for n in range(5)]


def run(target: PlainReference, speculation: dict[str, Any], late: bool = False, **settings: Any) -> LLM:
    settings = {"max_model_len": 64, "block_size": SIZE, "num_blocks": BLOCKS, "max_num_seqs": 2} | settings
    llm = LLM(target.path, speculation, async_scheduling=late, **settings)
    llm.generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    return llm


def seen_by(policy: str, log: list[tuple[str, tuple[Any, ...]]]) -> list[BudgetView]:
    return [args[0] for hook, args in log if hook == policy]


@LATE
def test_first_views(late: bool, target: PlainReference) -> None:
    """Five requests of 5 + 6 tokens, two at once, K = 3, blocks of 4: what both policies see in the first two steps."""
    log: list = []
    run(target, scripted(K, log=log), late)
    sizes = {"num_total_blocks": 40, "block_size": 4, "num_spec_blocks_held": 0}
    sizes |= {"num_speculative_tokens": 3, "max_candidates": 4}
    asked = BudgetView(num_running=0, num_waiting=5, num_free_blocks=40, step=0, **sizes)
    admitted = BudgetView(num_running=2, num_waiting=3, num_free_blocks=40 - 2 * 3, step=0, **sizes)
    assert seen_by("admit_limit", log)[0] == asked
    assert seen_by("candidate_budget", log)[0] == admitted, "5 prompt tokens, a bonus and 3 drafts: 3 blocks each"
    second = replace(admitted, step=1)
    assert seen_by("admit_limit", log)[1] == second
    assert seen_by("candidate_budget", log)[1] == second, "still within the 11 tokens a request can have"


@LATE
def test_views_follow_the_scheduler(late: bool, target: PlainReference) -> None:
    """At every call the view holds requests and free blocks of that moment, and a step number that grows by one."""
    engines: list[LLM] = []
    steps: dict[str, list[int]] = {"admit_limit": [], "candidate_budget": []}
    varied = set()

    def compare(policy: str, answer: Any) -> Any:
        def hook(_: object, view: BudgetView) -> Any:
            scheduler = engines[0].engine.core.scheduler
            held = [block for request in scheduler.running for block in request.blocks]
            assert len(set(held)) == len(held)
            assert view.num_free_blocks == view.num_total_blocks - len(held)
            assert view.num_running == len(scheduler.running)
            assert view.num_waiting == len(scheduler.request_ids) - len(scheduler.running)
            steps[policy].append(view.step)
            varied.add((view.num_free_blocks, view.num_running, view.num_waiting))
            return answer

        return hook

    speculation = scripted(
        K, candidate_budget=compare("candidate_budget", K + 1), admit_limit=compare("admit_limit", None)
    )
    engines.append(LLM(target.path, speculation, async_scheduling=late, block_size=2, num_blocks=24, max_model_len=32))
    engines[0].generate([ask.as_prompt for ask in ASKS], [ask.params for ask in ASKS])
    assert steps["candidate_budget"] == list(range(len(steps["candidate_budget"])))
    assert steps["admit_limit"] == sorted(set(steps["admit_limit"]))
    for place in range(3):
        assert len({entry[place] for entry in varied}) > 1, "nothing changed, so nothing was compared"


@pytest.mark.parametrize("declared", [2, 6])
def test_configured_k_is_not_the_declared_one(declared: int, target: PlainReference) -> None:
    """`num_speculative_tokens` is the user's K and `max_candidates` the cap, also where K + 1 is not declared."""
    log: list = []
    run(target, scripted(K, log=log, resources=SpecResources(max_candidates=declared)))
    views = seen_by("candidate_budget", log) + seen_by("admit_limit", log)
    assert {(view.num_speculative_tokens, view.max_candidates) for view in views} == {(K, declared)}
    budgets = {args[0].budget for hook, args in log if hook == "propose"}
    assert budgets == {min(K + 1, declared)}


def test_max_candidates_is_the_effective_one(target: PlainReference) -> None:
    """After lowering to fewer candidates the view names what is left, and the default budget is capped by it."""
    log: list = []
    adapt = lambda _, resources, capabilities: replace(resources, max_candidates=3)  # noqa: E731
    run(target, scripted(5, log=log, adapt_resources=adapt))
    views = seen_by("candidate_budget", log)
    assert {(view.num_speculative_tokens, view.max_candidates) for view in views} == {(5, 3)}
    assert {args[0].budget for hook, args in log if hook == "propose"} == {3}


def test_total_blocks_and_block_size_are_the_engines(target: PlainReference) -> None:
    """Another pool, another view."""
    log: list = []
    run(target, scripted(K, log=log), block_size=8, num_blocks=17)
    assert {(view.num_total_blocks, view.block_size) for view in seen_by("candidate_budget", log)} == {(17, 8)}


@LATE
def test_seconds_measure_rounds_and_not_idle_time(late: bool, target: PlainReference) -> None:
    """`RoundStats.seconds` holds what a round takes, and no time in which the engine had nothing to do."""
    stats: list[tuple[RoundStats, float]] = []
    pause = 0.01

    def finished(_: object, each: RoundStats) -> None:
        stats.append((each, time.perf_counter()))

    def slow(*_: object) -> Any:
        time.sleep(pause)
        return NotImplemented

    llm = LLM(target.path, scripted(K, round_finished=finished, propose=slow), async_scheduling=late)
    for _ in range(2):
        time.sleep(0.3)
        begun, first = time.perf_counter(), len(stats)
        llm.generate(ASKS[0].as_prompt, ASKS[0].params)
        rounds = stats[first:]
        assert len(rounds) > 2
        assert all(each.seconds >= (0 if late else pause) for each, _ in rounds)
        assert sum(each.seconds for each, _ in rounds) >= (len(rounds) - 1) * pause
        assert sum(each.seconds for each, _ in rounds) <= rounds[-1][1] - begun, "rounds do not overlap"
        assert rounds[0][0].seconds <= rounds[0][1] - begun, "idle time is no round's"


@LATE
def test_stats_repeat_the_counts_of_the_device(late: bool, target: PlainReference) -> None:
    """Step, candidates and committed tokens of each round are those that observe_step had on the device."""
    log: list = []
    run(target, scripted(K, log=log), late)
    stats = [args[0] for hook, args in log if hook == "round_finished"]
    seen = [args[0] for hook, args in log if hook == "observe_step"]
    assert [each.step for each in stats] == [view.step for view in seen_by("candidate_budget", log)]
    assert [list(each.num_candidates) for each in stats] == [each.num_candidates.tolist() for each in seen]
    assert [list(each.num_committed) for each in stats] == [each.num_committed.tolist() for each in seen]
    assert {count for each in stats for count in each.num_candidates} >= {1, 4}
