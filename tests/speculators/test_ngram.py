"""The n-gram speculator: lookups against a scan of the whole history, and the rows it writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.contract import (
    AcceptResult,
    BaseSpeculator,
    ConfigError,
    HostStep,
    ProposeView,
    SamplingView,
    find_speculator,
    overrides,
)
from specround.speculators.ngram import NgramConfig, NgramHistory

tokens = st.lists(st.integers(0, 2), max_size=40)


def propose_view(buffer, steps, budget):
    """The view of a step; `steps` are (request id, slot, committed, max_drafts)."""
    ids, slots, committed, allowed = zip(*steps, strict=True)
    empty = torch.zeros(len(ids), dtype=torch.int32)
    columns = torch.full((len(ids), buffer.shape[1] + 1), -1)
    return ProposeView(
        req_idx=torch.tensor(slots),
        num_computed_tokens=empty,
        root_token_ids=torch.tensor([new[-1] if new else -1 for new in committed]),
        max_rows=empty,
        token_history=torch.zeros(buffer.shape[0], 1, dtype=torch.int64),
        sampling=SamplingView(temperature=torch.zeros(buffer.shape[0])),
        seeds=torch.zeros(buffer.shape[0], dtype=torch.int64),
        budget=budget,
        draft_token_ids=buffer,
        row_start=torch.zeros(len(ids) + 1, dtype=torch.int32),
        root_row=empty,
        num_rows=(0,) * len(ids),
        row_req_idx=torch.empty(0, dtype=torch.int64),
        input_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        hidden_states=None,
        result=AcceptResult(columns.int(), empty, columns),
        any_sampled=False,
        host=HostStep(request_ids=ids, req_idx=slots, committed=committed, max_drafts=allowed),
    )


def started(config, **requests):
    """A speculator with requests in slots 0, 1, ..."""
    speculator = config.create(config.declare_resources(), None, torch.device("cpu"))
    for slot, (name, prompt) in enumerate(requests.items()):
        speculator.request_started(name, slot, prompt)
    return speculator


def scanned_draft(history, shortest, longest, limit):
    """What a scan from the newest to the oldest occurrence drafts, the longest n-gram first."""
    for length in range(min(longest, len(history)), shortest - 1, -1):
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length : end] == history[-length:]:
                text = list(history)
                while len(text) < len(history) + limit:
                    text.append(text[end + len(text) - len(history)])
                return text[len(history) :]
    return []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_min": True}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_max"),
        ({"prompt_lookup_max": 2.0}, "prompt_lookup_max"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
    ],
)
def test_config_refuses_by_field(fields, named):
    """Every field that is out of range is refused, and the error names that field."""
    with pytest.raises(ConfigError) as error:
        NgramConfig(**{"num_speculative_tokens": 4, **fields})
    assert error.value.field == named


def test_declares_a_host_drafted_chain():
    """The method is found by name and declares K + 1 candidates, no branching, host drafting, built-in plan."""
    assert find_speculator("ngram") is NgramConfig
    resources = NgramConfig(num_speculative_tokens=100).declare_resources()
    assert (resources.max_candidates, resources.kind, resources.drafting) == (101, "chain", "host")
    speculator = started(NgramConfig(num_speculative_tokens=4))
    assert not overrides(speculator, BaseSpeculator, "plan")
    assert not overrides(speculator, BaseSpeculator, "accept")


@settings(max_examples=150, deadline=None)
@given(tokens, st.lists(tokens, max_size=4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 9))
def test_draft_equals_a_scan(first, later, shortest, more, limit):
    """The incremental lookup drafts what a scan of the whole history drafts, after every extension."""
    history, seen = NgramHistory(shortest, shortest + more), []
    for part in [first, *later]:
        history.extend(part)
        seen += part
        assert history.draft(limit) == (scanned_draft(seen, shortest, shortest + more, limit) if limit else [])


def test_the_scan_tells_the_oldest_occurrence_from_the_newest():
    """Negative control: a lookup that keeps the first occurrence does not pass the comparison with the scan."""

    class Oldest(NgramHistory):
        def extend(self, part):
            for token in part:
                known = dict(self._continued_at)
                super().extend([token])
                self._continued_at.update(known)

    seen = [1, 2, 1, 3, 1]
    histories = NgramHistory(1, 2), Oldest(1, 2)
    for history in histories:
        history.extend(seen)
    assert [history.draft(1) for history in histories] == [[3], [2]]
    assert scanned_draft(seen, 1, 2, 1) == [3]


@pytest.mark.parametrize(("loop", "expected"), [([7], [7] * 6), ([7, 9], [7, 9] * 3), ([1, 2, 3], [1, 2, 3] * 2)])
def test_loops_are_drafted_past_the_end_of_the_history(loop, expected):
    """A copy that reaches the end of the history goes on periodically, so loops give full drafts."""
    history = NgramHistory(1, 4)
    history.extend(loop * 2)
    assert history.draft(6) == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 6)), min_size=1, max_size=4), st.integers(1, 6), st.data())
def test_rows_hold_the_limits(requests, num_drafts, data):
    """Rows are drafts then -1, at most min(K, budget - 1, max_drafts) long, for every request of the step and no other.

    A request that committed nothing has an empty row.
    """
    budget = data.draw(st.integers(1, num_drafts + 1))
    speculator = started(
        NgramConfig(num_speculative_tokens=num_drafts), **{f"r{i}": prompt for i, (prompt, _, _) in enumerate(requests)}
    )
    buffer = torch.full((len(requests) + 1, num_drafts), -7)
    order = data.draw(st.permutations(range(len(requests))))
    steps = [(f"r{i}", i, tuple(requests[i][1]), requests[i][2]) for i in order]
    speculator.propose(propose_view(buffer, steps, budget))
    for slot, (prompt, committed, allowed) in enumerate(requests):
        limit = min(num_drafts, budget - 1, allowed)
        drafts = scanned_draft(prompt + committed, 1, 4, limit) if committed and limit else []
        assert buffer[slot].tolist() == drafts + [-1] * (num_drafts - len(drafts))
    assert buffer[-1].tolist() == [-7] * num_drafts


def test_absorb_follows_without_drafting():
    """A round without drafts empties the rows, and the tokens it committed are looked up afterwards."""
    speculator = started(NgramConfig(num_speculative_tokens=3), a=[4, 5])
    buffer = torch.full((1, 3), -7)
    speculator.absorb(propose_view(buffer, [("a", 0, (6, 4), 3)], budget=1))
    assert buffer.tolist() == [[-1, -1, -1]]
    speculator.propose(propose_view(buffer, [("a", 0, (5,), 3)], budget=4))
    assert buffer.tolist() == [[6, 4, 5]]


def test_a_finished_request_leaves_nothing():
    """A new request in the same slot and under the same id starts from its own tokens alone."""
    speculator = started(NgramConfig(num_speculative_tokens=2), a=[1, 2, 3])
    speculator.request_finished("a", 0, [1, 2, 3])
    speculator.request_started("a", 0, [])
    buffer = torch.full((1, 2), -7)
    speculator.propose(propose_view(buffer, [("a", 0, (1,), 2)], budget=3))
    assert buffer.tolist() == [[-1, -1]]


def test_effective_resources_bound_the_drafts():
    """Fewer effective candidates than declared shorten every draft."""
    config = NgramConfig(num_speculative_tokens=4)
    speculator = started(config, a=[1, 1, 1])
    speculator.bind_resources(NgramConfig(num_speculative_tokens=2).declare_resources())
    buffer = torch.full((1, 4), -7)
    speculator.propose(propose_view(buffer, [("a", 0, (1,), 4)], budget=5))
    assert buffer.tolist() == [[1, 1, -1, -1]]
