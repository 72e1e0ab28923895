"""The suffix-tree speculator: its config, its plans, and what it drafts from."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.contract import (
    AcceptResult,
    ConfigError,
    HostStep,
    PlanView,
    ProposeView,
    SamplingView,
    SpecCapabilities,
    find_speculator,
)
from specround.speculators.suffix_tree import SuffixTreeConfig

SLOTS = 4


def view_of(cls, **fields):
    """A view with the given fields; the others are empty: the speculator does not read them."""
    columns = torch.empty(0, 1, dtype=torch.int64)
    empty = torch.empty(0, dtype=torch.int64)
    known = {
        "sampling": SamplingView(temperature=empty),
        "result": AcceptResult(columns, empty, columns),
        "draft_token_ids": columns,
    }
    return cls(**{field.name: known.get(field.name, empty) for field in dataclasses.fields(cls)} | fields)


def propose(speculator, *steps, budget=64, hook="propose"):
    """Run a host step; each of `steps` is (request id, slot, committed tokens, max_drafts)."""
    ids, slots, committed, allowed = zip(*steps, strict=True)
    host = HostStep(
        request_ids=ids, req_idx=slots, committed=tuple(tuple(new) for new in committed), max_drafts=allowed
    )
    getattr(speculator, hook)(view_of(ProposeView, req_idx=torch.tensor(slots), budget=budget, host=host))


def plan(speculator, slots, columns, rows=None, roots=None):
    """The plan of a step with requests in the given slots."""
    return speculator.plan(
        view_of(
            PlanView,
            req_idx=torch.tensor(slots),
            root_token_ids=torch.tensor(roots or [99] * len(slots)),
            max_rows=torch.tensor(rows or [columns] * len(slots), dtype=torch.int32),
            num_columns=columns,
            budget=columns,
        )
    )


def created(num_drafts=8, started=(), device="cpu", **fields):
    """A speculator with `SLOTS` slots; `started` are prompts of requests "0", "1", ... in slots 0, 1, ..."""
    config = SuffixTreeConfig(num_speculative_tokens=num_drafts, **fields)
    host = SimpleNamespace(max_num_seqs=SLOTS)
    speculator = config.create(config.declare_resources(), host, torch.device(device))
    for slot, prompt in enumerate(started):
        speculator.request_started(str(slot), slot, prompt)
    return speculator


BRANCHY = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1]
"""After one more 2, both 3 and 4 have followed "1 2"."""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_speculative_tokens": 64}, "num_speculative_tokens"),
        ({"max_branching": 0}, "max_branching"),
        ({"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth"),
        ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
        ({"suffix_decoding_max_cached_requests": True}, "suffix_decoding_max_cached_requests"),
        ({"suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({"suffix_decoding_min_token_prob": "0.1"}, "suffix_decoding_min_token_prob"),
    ],
)
def test_config_refuses_by_field(fields, named):
    """Every field that is out of range is refused, and the error names that field."""
    with pytest.raises(ConfigError) as error:
        SuffixTreeConfig(**{"num_speculative_tokens": 8, **fields})
    assert error.value.field == named


def test_declares_host_drafted_trees_or_chains():
    """The method is found by name; branching declares trees of at most 63 drafts, no branching chains of any length."""
    assert find_speculator("suffix_tree") is SuffixTreeConfig
    tree = SuffixTreeConfig(num_speculative_tokens=63).declare_resources()
    assert (tree.max_candidates, tree.kind, tree.drafting) == (64, "tree", "host")
    chain = SuffixTreeConfig(num_speculative_tokens=100, max_branching=1).declare_resources()
    assert (chain.max_candidates, chain.kind, chain.drafting) == (101, "chain", "host")


@pytest.mark.parametrize("loop", [[7], [7, 9], [1, 2, 3]])
@pytest.mark.parametrize("branching", [1, 4])
def test_loops_give_deep_chains(loop, branching):
    """A text that repeats is drafted to the full depth, each draft certain."""
    speculator = created(num_drafts=16, started=[loop * 30], max_branching=branching)
    propose(speculator, ("0", 0, loop, 16))
    found = plan(speculator, [0], 17)
    assert found.num_candidates.tolist() == [17]
    assert found.token_ids[0, 1:].tolist() == (loop * 16)[:16]
    assert speculator.draft_scores("0") == (1.0,) * 16
    if branching > 1:
        assert found.parents.tolist() == [list(range(-1, 16))]


def test_a_plan_branches():
    """Both continuations that have occurred are verified, the more frequent one first, then the more recent one."""
    speculator = created(started=[BRANCHY], suffix_decoding_max_spec_factor=3.0)
    propose(speculator, ("0", 0, [2], 8))
    found = plan(speculator, [0], 9, roots=[2])
    assert found.kind == "tree"
    assert found.num_candidates.tolist() == [7]
    assert found.token_ids[0].tolist() == [2, 3, 5, 1, 2, 4, 1, -1, -1]
    assert found.parents[0].tolist() == [-1, 0, 1, 2, 3, 0, 5, -1, -1]
    assert speculator.draft_scores("0") == (2 / 3, *[1 / 3] * 5)
    cut = plan(speculator, [0], 6, rows=[5], roots=[2])
    assert cut.token_ids[0].tolist() == [2, 3, 5, 1, 2, -1]
    assert cut.parents[0].tolist() == [-1, 0, 1, 2, 3, -1]
    assert (found.token_ids.dtype, found.parents.dtype, found.num_candidates.dtype) == (
        torch.int64,
        torch.int32,
        torch.int32,
    )


def test_lowered_to_a_chain_only_the_best_path_is_planned():
    """With branching lowered to 1 the plan is a chain without parents: each draft the most frequent continuation."""
    speculator = created(started=[BRANCHY], suffix_decoding_max_spec_factor=2.0)
    config = SuffixTreeConfig(num_speculative_tokens=8)
    lowered = config.adapt_resources(config.declare_resources(), SpecCapabilities(kind="chain"))
    speculator.bind_resources(lowered)
    propose(speculator, ("0", 0, [2], 8))
    found = plan(speculator, [0], 9)
    assert (found.kind, found.parents) == ("chain", None)
    assert found.token_ids[0].tolist()[: int(found.num_candidates[0])] == [99, 3, 5, 1, 2]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), max_size=30),
            st.lists(st.integers(0, 1), max_size=5),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=SLOTS,
    ),
    st.integers(1, 9),
    st.integers(1, 4),
    st.data(),
)
def test_plans_hold_every_limit(requests, num_drafts, branching, data):
    """Any batch order, columns, rows and budget: used columns are a prefix, trees are legal, and no limit is passed."""
    budget, columns = data.draw(st.integers(1, num_drafts + 1)), data.draw(st.integers(1, num_drafts + 1))
    speculator = created(num_drafts, [prompt for prompt, *_ in requests], max_branching=branching)
    propose(speculator, *((str(i), i, new, most) for i, (_, new, most, _) in enumerate(requests)), budget=budget)
    order = data.draw(st.permutations([*range(len(requests)), SLOTS]))
    rows = [min(requests[i][3], columns) if i < SLOTS else 0 for i in order]
    found = plan(speculator, order, columns, rows=rows)
    for r, slot in enumerate(order):
        count = int(found.num_candidates[r])
        assert found.token_ids[r, count:].tolist() == [-1] * (columns - count)
        if slot == SLOTS:
            assert count == 0
            continue
        _, new, most, _ = requests[slot]
        drafts = len(speculator.draft_scores(str(slot)))
        assert drafts <= min(num_drafts, budget - 1, most)
        assert count == min(1 + drafts, rows[r], columns)
        assert new or drafts == 0
        parents = list(range(-1, count - 1)) if branching == 1 else found.parents[r, :count].tolist()
        edges = list(zip(parents, found.token_ids[r, :count].tolist(), strict=True))[1:]
        assert all(0 <= parent < column for column, (parent, _) in enumerate(edges, 1))
        assert len(set(edges)) == len(edges)
        assert all(parents.count(parent) <= branching for parent in parents)
        assert branching == 1 or found.parents[r, count:].tolist() == [-1] * (columns - count)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_a_resumed_request_drafts_what_it_would_have(prompt, output):
    """A request followed step by step and one that resumes with the same tokens draft the same."""
    followed = created(started=[prompt])
    for token in output:
        propose(followed, ("0", 0, [token], 8))
    resumed = created(started=[prompt + output[:-1]])
    propose(resumed, ("0", 0, output[-1:], 8))
    plans = plan(followed, [0], 9), plan(resumed, [0], 9)
    assert torch.equal(plans[0].token_ids, plans[1].token_ids)
    assert torch.equal(plans[0].parents, plans[1].parents)


def test_stale_drafts_are_never_planned():
    """A slot is empty for a request that starts, after a prefill chunk, and after a round that verifies no drafts."""
    speculator = created(started=[BRANCHY])

    def drafts():
        return int(plan(speculator, [0], 9).num_candidates[0]) - 1

    propose(speculator, ("0", 0, [2], 8))
    assert drafts() > 0, "negative control: without a reason to empty it, the slot has drafts"
    speculator.request_finished("0", 0, [*BRANCHY, 2])
    speculator.request_started("new", 0, [8])
    assert drafts() == 0
    assert speculator.draft_scores("0") == speculator.draft_scores("new") == ()
    propose(speculator, ("new", 0, BRANCHY, 8))
    propose(speculator, ("new", 0, [2], 8))
    assert drafts() > 0
    propose(speculator, ("new", 0, [], 8))
    assert drafts() == 0
    propose(speculator, ("new", 0, [3, 1, 2], 8))
    assert drafts() > 0
    propose(speculator, ("new", 0, [3, 1, 2], 8), budget=1, hook="absorb")
    assert drafts() == 0


def test_absorb_follows_the_tokens():
    """Tokens committed in a round without drafts are drafted from afterwards."""
    speculator = created(started=[[5, 6]])
    propose(speculator, ("0", 0, [7, 8, 9], 8), budget=1, hook="absorb")
    propose(speculator, ("0", 0, [7], 8))
    assert plan(speculator, [0], 9).token_ids[0, 1].item() == 8


def test_one_draft_and_a_budget_of_one():
    """K = 1 drafts one token, a budget of 1 none, and one column is the root alone."""
    speculator = created(num_drafts=1, started=[[4, 4, 4]])
    propose(speculator, ("0", 0, [4], 1))
    assert plan(speculator, [0], 2).token_ids.tolist() == [[99, 4]]
    only_root = plan(speculator, [0], 1)
    assert (only_root.token_ids.tolist(), only_root.num_candidates.tolist()) == ([[99]], [1])
    propose(speculator, ("0", 0, [4], 1), budget=1)
    assert plan(speculator, [0], 2).num_candidates.tolist() == [1]


def test_planning_waits_for_no_device_and_keeps_addresses():
    """`plan` runs on the meta device, where reading a value is an error, and reuses its buffers."""
    on_meta = created(started=[[1, 2]], device="meta")
    with torch.device("meta"):
        found = plan(on_meta, [0, SLOTS], 9)
        with pytest.raises(RuntimeError):
            found.num_candidates[0].item()
    assert found.token_ids.shape == (2, 9)
    speculator = created(started=[[1, 2]])
    first, second = plan(speculator, [0, 1], 9), plan(speculator, [1, 0], 9)
    for name in ("token_ids", "num_candidates", "parents"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_finished_requests_are_drafted_from():
    """With a cache, a new request drafts from a finished one; without one it has nothing to draft from."""
    text, found = [10, 11, 12, 13, 14, 15, 16], []
    for cached in (0, 2):
        speculator = created(started=[text], suffix_decoding_max_cached_requests=cached)
        speculator.request_finished("0", 0, text)
        speculator.request_started("1", 1, [3, 10, 11])
        propose(speculator, ("1", 1, [12], 8))
        found.append(plan(speculator, [1], 9).token_ids[0, 1:5].tolist())
    assert found == [[-1, -1, -1, -1], [13, 14, 15, -1]]


def test_own_text_wins_over_an_equal_cached_one():
    """Of equally good trees the request's own is taken, and the cached request does not count as used."""
    speculator = created(started=[[1, 2, 7], [8, 9]], suffix_decoding_max_cached_requests=2)
    for slot, text in enumerate([[1, 2, 7], [8, 9]]):
        speculator.request_finished(str(slot), slot, text)
    speculator.request_started("2", 2, [1, 2, 5, 1])
    propose(speculator, ("2", 2, [2], 8))
    assert plan(speculator, [2], 9).token_ids[0, 1].item() == 5
    assert speculator.cached_requests == ("0", "1")
    speculator.request_started("3", 3, [1])
    propose(speculator, ("3", 3, [2], 8))
    assert plan(speculator, [3], 9).token_ids[0, 1].item() == 7
    assert speculator.cached_requests == ("1", "0")


def test_a_preempted_request_is_indexed_once():
    """Preemption and resumption leave one copy in the cache: none while the request runs, one when it has finished."""
    speculator = created(started=[BRANCHY], suffix_decoding_max_cached_requests=4)
    speculator.request_finished("0", 0, BRANCHY)
    assert speculator.cached_requests == ("0",)
    speculator.request_started("0", 2, BRANCHY)
    assert speculator.cached_requests == ()
    final = [*BRANCHY, 2, 4]
    speculator.request_finished("0", 2, final)
    assert speculator.cached_requests == ("0",)
    speculator.request_started("1", 1, [0])
    propose(speculator, ("1", 1, [1, 2], 8))
    assert speculator.draft_scores("1")[:2] == (0.5, 0.5), "3 and 4 have each followed 1 2 twice, not more often"


def test_the_cache_is_bounded():
    """At most the configured number of finished requests is kept, and the oldest unused one leaves."""
    speculator = created(suffix_decoding_max_cached_requests=2)
    for name in "abc":
        speculator.request_started(name, 0, [1])
        speculator.request_finished(name, 0, [1, 2])
    assert speculator.cached_requests == ("b", "c")


def test_tokens_may_be_large():
    """Token ids need not be small: they are keys, not array indices."""
    big = 2**40
    speculator = created(started=[[big, big + 1, 0]])
    propose(speculator, ("0", 0, [big], 8))
    assert plan(speculator, [0], 9).token_ids[0, :2].tolist() == [99, big + 1]
