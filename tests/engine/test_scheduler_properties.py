"""The scheduler under random arrivals, aborts, budgets and pools: nothing is shared, lost, overtaken or starved."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_model import SchedulerBook, Settings

from specround.contract import RequestError

SETTINGS = st.builds(
    Settings,
    drafts=st.sampled_from((1, 3, 7)),
    block_size=st.sampled_from((1, 4, 16)),
    extra_blocks=st.sampled_from((0, 1, 5, 40)),
    num_seqs=st.sampled_from((1, 2, 5)),
    batched_tokens=st.sampled_from((1, 6, 200)),
    late=st.booleans(),
)


def run(book: SchedulerBook, seed: int, count: int, abort_share: float) -> None:
    """Random life until every request left."""
    rng = random.Random(seed)
    added = 0
    for _ in range(3000):
        while added < count and rng.random() < 0.4:
            free = [name for name in map(str, range(6)) if name not in book.scheduler.request_ids]
            if not free:
                break
            prompt = rng.randint(1, 20)
            book.add(free[0], prompt, rng.randint(1, 24), rng.choice((None, None, 0, 1, 3)))
            added += 1
        busy = book.step()
        alive = book.scheduler.request_ids
        if alive and rng.random() < abort_share:
            book.abort(rng.choice(sorted(alive)))
        if added == count and not busy and not book.scheduler.has_work:
            return
    pytest.fail(f"requests starve: {book.scheduler.request_ids} after 3000 steps")


def check_end(book: SchedulerBook, count: int) -> None:
    """Everyone finished with consecutive tokens of its own, and everything is free."""
    assert book.pool.num_free == book.pool.num_total
    assert not book.scheduler._in_flight
    assert not book.steps
    assert len({*book.finished, *book.aborted}) == count
    for request, number in book.numbers.items():
        first = 1000 * number + len(request.new.prompt_token_ids)
        got = book.got[request]
        assert got == list(range(first, first + len(got)))
        assert request.token_ids == [*request.new.prompt_token_ids, *got]
        if request in book.aborted:
            continue
        stopped = request.new.stop_token_ids & set(got)
        assert stopped == ({got[-1]} if stopped else set()), "a token after a stop token"
        assert stopped or len(got) == request.new.max_tokens


@settings(max_examples=120, deadline=None)
@given(SETTINGS, st.integers(0, 2**32))
def test_random_life(chosen: Settings, seed: int) -> None:
    """Everyone finishes; blocks, slots, budgets and order hold in every step; ids are reused after aborts."""
    book = SchedulerBook(chosen, seed)
    run(book, seed, 14, abort_share=0.1)
    check_end(book, 14)


@settings(max_examples=60, deadline=None)
@given(SETTINGS, st.integers(0, 2**32))
def test_nobody_starves(chosen: Settings, seed: int) -> None:
    """Without aborts, on any pool that holds one request, all requests finish."""
    book = SchedulerBook(chosen, seed)
    run(book, seed, 10, abort_share=0.0)
    assert len(book.finished) == 10
    check_end(book, 10)


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
def test_preempted_requests_resume_first(late: bool) -> None:
    """When blocks run out the newest request makes room; it returns to the front of the queue, before newcomers."""
    book = SchedulerBook(Settings(1, 1, 4, 4, 200, late), 5)
    for name in "abcd":
        book.add(name, 5, 18, None)
    order: list[list[str]] = []
    for _ in range(400):
        if not book.step() and not book.scheduler.has_work:
            break
        queue = [request.request_id for request in book.scheduler.waiting]
        order.append(queue)
        assert queue == sorted(queue), "the queue keeps the order of arrival, preempted requests included"
    assert book.scheduler.num_preemptions > 0
    assert book.finished[0].request_id == "a", "the oldest request is never preempted"
    check_end(book, 4)


def test_a_reused_slot_gets_no_old_results() -> None:
    """Tokens of a request aborted with a step in flight reach neither the slot's next owner nor the id's next user."""
    book = SchedulerBook(Settings(3, 4, 40, 1, 200, late=True), 1)
    book.add("a", 3, 10, None)
    book.step()
    first = book.scheduler._requests["a"]
    assert first.in_flight
    book.abort("a")
    book.add("a", 4, 10, None)
    second = book.scheduler._requests["a"]
    while book.scheduler.has_work or book.steps:
        book.step()
    assert second.req_idx == -1
    assert book.got[first] == []
    assert len(book.got[second]) == 10
    check_end(book, 2)


def test_a_duplicate_id_is_refused_and_changes_nothing() -> None:
    """The id of a waiting or running request cannot be taken; the error names it."""
    book = SchedulerBook(Settings(3, 4, 40, 2, 200, late=False), 1)
    book.add("a", 3, 4, None)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"request_id='a'.*unique"):
            book.scheduler.add(book.scheduler._requests["a"].new)
        book.step()
    assert book.scheduler.request_ids == ("a",)


def test_long_runs_remember_no_steps() -> None:
    """Steps that only tell of requests that left are not kept for results that never come."""
    book = SchedulerBook(Settings(1, 4, 40, 2, 200, late=True), 3)
    for turn in range(20):
        book.add("a", 3, 5, None)
        book.step()
        book.abort("a")
        while book.scheduler.has_work or book.steps:
            book.step()
        assert not book.scheduler._in_flight, f"after {turn + 1} requests"


def test_every_running_request_gets_a_row() -> None:
    """However few rows a step has, drafts of the first requests never take the root row of a later one."""
    book = SchedulerBook(Settings(3, 4, 40, 4, 4, late=False), 1)
    for name in "abcd":
        book.add(name, 1, 12, None)
    book.step()
    for _ in range(6):
        book.step()
        assert set(book.log[-1].request_ids) == set("abcd")
        assert sum(book.log[-1].shape.num_rows) <= 4
