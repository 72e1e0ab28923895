"""Policies on the host: when they are asked, what they are shown, and what their answers bound."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from plain_reference import Ask, PlainReference, Tally, check_at_rest
from scripted import scripted
from speculator_fleet import ACCEPTS_ALL, FLEET, MAX_MODEL_LEN, MUST_ACCEPT, Models, workload

from specround import LLM, BudgetView, SpeculatorConfig

LATE = pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
ASKS = [Ask((3 + n, 4, 5)[: 1 + n % 3], 6 + n) for n in range(6)]


def run(llm: LLM, target: PlainReference, asks: list[Ask]) -> list:
    outputs = llm.generate([ask.as_prompt for ask in asks], [ask.params for ask in asks])
    tally = Tally()
    for ask, output in zip(asks, outputs, strict=True):
        target.compare(ask, output.outputs[0].token_ids, tally)
    tally.check()
    check_at_rest(llm)
    return outputs


@LATE
def test_the_budget_bounds_the_next_round(late: bool, target: PlainReference) -> None:
    """Asked once per step, after admission; the answer caps propose's budget and the rows of the next step."""
    rng, log, chosen = random.Random(3), [], []

    def budget(config: SpeculatorConfig, view: BudgetView) -> int:
        chosen.append(rng.choice((1, 2, 4, 99)))
        return chosen[-1]

    llm = LLM(target.path, scripted(3, candidate_budget=budget, log=log), async_scheduling=late, max_num_seqs=4)
    run(llm, target, ASKS)
    steps = []
    for hook, args in log:
        if hook == "candidate_budget":
            steps.append({"budget": args[0]})
        elif hook in ("plan", "propose", "absorb", "observe_step"):
            steps[-1].setdefault(hook, []).append(args[0])
    assert len(steps) == len(chosen) > 10
    bound = 1
    for step, answer in zip(steps, chosen, strict=True):
        view, (plan,), (proposal,) = step["budget"], step["plan"], step.get("propose") or step["absorb"]
        if late:  # a request may run whose last tokens are still under way, and be in no step
            assert view.num_running >= len(plan.req_idx)
        else:
            assert view.num_running == len(plan.req_idx), "asked after the step was scheduled"
        assert plan.budget == bound
        assert int(plan.max_rows.max()) <= plan.num_columns <= max(bound, 1)
        bound = min(answer, 4)
        assert proposal.budget == bound
        assert ("absorb" in step, "propose" in step) == (bound == 1, bound > 1)
        assert len(step["observe_step"]) == 1
    views = [step["budget"] for step in steps]
    assert [view.step for view in views] == sorted({view.step for view in views})
    assert all(view.max_candidates == 4 and view.num_speculative_tokens == 3 for view in views)
    assert all(view.num_total_blocks == llm.engine.core.scheduler.pool.num_total for view in views)


@LATE
def test_at_budget_one_nothing_is_drafted(late: bool, target: PlainReference) -> None:
    """A budget of 1 means no drafts: propose is never called, absorb and observe_step are, draft rows stay -1."""
    log: list = []
    llm = LLM(target.path, scripted(3, candidate_budget=lambda *_: 1, log=log), async_scheduling=late)
    outputs = run(llm, target, ASKS)
    hooks = [hook for hook, _ in log]
    assert hooks.count("propose") == 0
    assert hooks.count("absorb") == hooks.count("observe_step") == hooks.count("candidate_budget") > 5
    assert all(int(args[0].max_rows.max()) == 1 for hook, args in log if hook == "plan")
    assert sum(output.metrics.drafted for output in outputs) == 0
    assert bool((llm.engine.core.runner.state.draft_token_ids == -1).all())


@LATE
@pytest.mark.parametrize("name", FLEET)
def test_random_budgets_change_no_token(name: str, late: bool, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every speculator under budgets that jump between 1 and K + 1: tokens are plain, drafters lose no state."""
    rng = random.Random(11)
    monkeypatch.setattr(SpeculatorConfig, "candidate_budget", lambda self, view: rng.choice((1, 2, 3, 5, 8)))
    asks = workload(7)[::2]
    llm = LLM(
        models.target.path,
        models.config(name, 7, asks),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=5,
        block_size=4,
        max_num_batched_tokens=32,
        async_scheduling=late,
    )
    outputs = run(llm, models.target, asks)
    drafted = sum(output.metrics.drafted for output in outputs)
    accepted = sum(output.metrics.accepted for output in outputs)
    assert drafted > 0
    if name in MUST_ACCEPT:
        assert accepted > 0
    if name in ACCEPTS_ALL:
        assert accepted == drafted, "a step without drafts left a gap in the drafter's cache"


def test_batch_size_schedule(target: PlainReference) -> None:
    """num_speculative_tokens_per_batch_size: with so many requests running, so many drafts; 0 allowed."""
    log: list = []
    config = scripted(5, log=log) | {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 3, 0]]}
    run(LLM(target.path, config), target, ASKS)
    expected = {1: 5, 2: 1, 3: 1, 4: 6, 5: 6, 6: 6}
    seen = {}
    for hook, args in log:
        if hook == "candidate_budget":
            running = args[0].num_running
        elif hook in ("propose", "absorb"):
            seen[running] = args[0].budget
    assert seen == {running: expected[running] for running in seen}
    assert {1, 3, 6} <= seen.keys()


@LATE
def test_admit_limit(late: bool, target: PlainReference) -> None:
    """Asked once per pass that has waiting requests, before the budget; never more run than it says."""
    log: list = []
    answers = iter([1, 1, 2, None, 3] + [2] * 500)
    limits = []

    def limit(config: SpeculatorConfig, view: BudgetView) -> int | None:
        limits.append((view, next(answers)))
        return limits[-1][1]

    llm = LLM(target.path, scripted(2, admit_limit=limit, log=log), max_num_seqs=4, async_scheduling=late)
    run(llm, target, ASKS)
    assert all(view.num_waiting > 0 for view, _ in limits)
    policies = [hook for hook, _ in log if hook in ("admit_limit", "candidate_budget")]
    assert "admit_limit" in policies
    for first, second in pairwise(policies):
        assert (first, second) != ("admit_limit", "admit_limit")
    allowed = {view.step: answer for view, answer in limits}
    running = 0
    for hook, args in log:
        if hook == "candidate_budget" and args[0].step in allowed:
            limit_now = allowed[args[0].step]
            before, running = running, args[0].num_running
            assert running <= max(min(limit_now or 4, 4), before), "it admits no more, and it never preempts"
    assert llm.engine.core.scheduler.num_preemptions == 0


@LATE
def test_round_finished_counts_what_requests_count(late: bool, target: PlainReference) -> None:
    """The statistics of all rounds add up to the requests' own metrics, in step order."""
    log: list = []
    outputs = run(LLM(target.path, scripted(3, log=log), async_scheduling=late), target, ASKS)
    stats = [args[0] for hook, args in log if hook == "round_finished"]
    assert [each.step for each in stats] == sorted(each.step for each in stats)
    assert all(each.seconds >= 0 for each in stats)
    committed = sum(sum(each.num_committed) for each in stats)
    drafted = sum(sum(max(0, n - 1) for n in each.num_candidates) for each in stats)
    if late:  # rounds that were under way when their request ended are counted here only
        assert committed >= sum(output.metrics.committed for output in outputs)
    else:
        assert committed == sum(output.metrics.committed for output in outputs)
        assert drafted == sum(output.metrics.drafted for output in outputs)


def test_observations_of_chunked_prefill(target: PlainReference) -> None:
    """observe_step sees sampled steps only, with device counts per request; chunks that end no prefill are none."""
    log: list = []
    ask = Ask(tuple(range(3, 23)), 4)
    run(LLM(target.path, scripted(2, log=log), max_num_seqs=2, max_num_batched_tokens=6), target, [ask])
    hooks = [hook for hook, _ in log if hook in ("candidate_budget", "observe_step")]
    assert hooks[:5] == ["candidate_budget"] * 4 + ["observe_step"], "20 tokens in chunks of 6: the fourth one samples"
    seen = [args[0] for hook, args in log if hook == "observe_step"]
    assert [each.num_requests for each in seen] == [1] * len(seen)
    assert seen[0].num_rows == 2
    assert sum(int(each.num_committed.sum()) for each in seen) == 4
    assert all(int(each.num_candidates[0]) >= int(each.num_committed[0]) for each in seen)


@LATE
def test_request_hooks_pair_up(late: bool, target: PlainReference) -> None:
    """request_started and request_finished alternate per request and slot, with the tokens known at that time."""
    log: list = []
    llm = LLM(
        target.path,
        scripted(3, log=log),
        max_num_seqs=3,
        max_model_len=32,
        block_size=2,
        num_blocks=18,
        async_scheduling=late,
    )
    asks = [Ask((3 + n, 5), 25) for n in range(6)]
    run(llm, target, asks)
    assert llm.engine.core.scheduler.num_preemptions > 0
    slots: dict[int, str] = {}
    last: dict[str, tuple[int, ...]] = {}
    for hook, args in log:
        if hook == "request_started":
            request_id, req_idx, tokens = args
            assert req_idx not in slots
            slots[req_idx] = request_id
            assert tokens[: len(last.get(request_id, ()))] == last.get(request_id, ()), "it resumes with what it had"
        elif hook == "request_finished":
            request_id, req_idx, tokens = args
            assert slots.pop(req_idx) == request_id
            last[request_id] = tokens
    assert not slots
    answers = target.answers(asks)
    assert sorted(last.values()) == sorted((*a.prompt, *t) for a, t in zip(asks, answers, strict=True))
