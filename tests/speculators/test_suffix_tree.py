"""The suffix-tree speculator: draft trees against a scan of the texts, and the plans made of them."""

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
from specround.speculators import suffix_tree
from specround.speculators.suffix_index import SuffixIndex
from specround.speculators.suffix_tree import DraftTree, GrowthLimits, SuffixTreeConfig, best_tree, grow_tree

DEPTH = 5
SLOTS = 4
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=3)
limits = st.builds(
    GrowthLimits,
    max_branching=st.integers(1, 3),
    max_depth=st.integers(1, 8),
    min_score=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    spec_factor=st.sampled_from([0.4, 1.0, 2.0, 50.0]),
)


def ends(sequences, string):
    """(sequence, end) of each occurrence of a string, oldest first."""
    size = len(string)
    starts = ((number, start) for number, text in enumerate(sequences) for start in range(len(text) - size + 1))
    return [(number, start + size) for number, start in starts if sequences[number][start : start + size] == string]


def scanned_tree(sequences, context, limit, max_nodes):
    """The tree that follows from the definition, every count taken by reading all the texts."""
    drafts, frontier, found = [], [], 0
    string, column, depth, score = list(context), 0, 0, 1.0
    while len(drafts) < max_nodes:
        if len(string) >= DEPTH and len(ends(sequences, string[:DEPTH])) > 1:
            string = string[1:]
        after = {}
        for number, end in ends(sequences, string):
            if end < len(sequences[number]):
                after.setdefault(sequences[number][end], []).append((number, end))
        total = sum(map(len, after.values()))
        ordered = sorted(after.items(), key=lambda item: (len(item[1]), item[1][-1]), reverse=True)
        for token, places in ordered[: limit.max_branching]:
            child = score * (len(places) / total)
            if depth < limit.max_depth and child >= limit.min_score:
                newest = tuple(-part for part in places[-1])
                frontier.append((-child, newest, token, found, column, depth + 1, [*string, token]))
                found += 1
        if not frontier:
            break
        chosen = min(frontier)
        frontier.remove(chosen)
        negative, _, token, _, parent, depth, string = chosen
        score = -negative
        drafts.append((token, parent, score))
        column = len(drafts)
    return DraftTree(*zip(*drafts, strict=True)) if drafts else DraftTree()


def check_tree(tree, limit, max_nodes):
    """What holds for every draft tree, whatever the counts."""
    assert len(tree.tokens) == len(tree.parents) == len(tree.scores) <= max_nodes
    siblings, children, depths = set(), {}, [0]
    for column, (token, parent, score) in enumerate(zip(tree.tokens, tree.parents, tree.scores, strict=True), 1):
        assert 0 <= parent < column, "parents come before their children"
        assert (parent, token) not in siblings, "siblings are distinct"
        assert score >= limit.min_score
        assert parent == 0 or score <= tree.scores[parent - 1], "scores do not rise along a path"
        assert column == 1 or score <= tree.scores[column - 2], "columns stand best first"
        siblings.add((parent, token))
        children[parent] = children.get(parent, 0) + 1
        depths.append(depths[parent] + 1)
        assert children[parent] <= limit.max_branching
        assert depths[column] <= limit.max_depth


def index_of(sequences, depth=DEPTH, max_children=3):
    """An index of sequences; the last one is open."""
    index = SuffixIndex(depth, max_children)
    for number, text in enumerate(sequences):
        index.add(str(number), text)
    return index


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


@settings(max_examples=150, deadline=None)
@given(texts, limits, st.integers(0, 10), st.data())
def test_a_tree_equals_a_scan(sequences, limit, max_nodes, data):
    """Tokens, parents, scores and the order of ties are those of the definition; the bounds hold for every tree."""
    source = data.draw(st.sampled_from(sequences))
    start = data.draw(st.integers(0, len(source) - 1))
    context = source[start : start + data.draw(st.integers(1, DEPTH - 1))]
    index = index_of(sequences)
    tree = grow_tree(index, index.match(context), limit, max_nodes)
    assert tree == scanned_tree(sequences, context, limit, max_nodes)
    check_tree(tree, limit, max_nodes)


def test_the_checks_catch_a_tree_that_is_not_grown_best_first(monkeypatch):
    """Negative control: a tree grown in order of discovery fails both the scan and the check of the order."""
    text, limit = [0, 1, 0, 1, 0, 2, 0, 1, 1, 0, 2, 1, 0], GrowthLimits(max_branching=3, max_depth=4)
    index = index_of([text])
    check_tree(grow_tree(index, index.match([0]), limit, 8), limit, 8)
    queue = SimpleNamespace(heappush=list.append, heappop=lambda heap: heap.pop(0))
    monkeypatch.setattr(suffix_tree, "heapq", queue)
    broken = grow_tree(index, index.match([0]), limit, 8)
    assert broken != scanned_tree([text], [0], limit, 8)
    with pytest.raises(AssertionError, match="best first"):
        check_tree(broken, limit, 8)


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (DraftTree((1, 2), (0, 2), (0.5, 0.5)), "parents come before"),
        (DraftTree((1, 1), (0, 0), (0.5, 0.5)), "distinct"),
        (DraftTree((1, 2), (0, 1), (0.5, 0.6)), "along a path"),
    ],
)
def test_the_check_of_trees_catches_each_fault(tree, named):
    """Negative control: a late parent, equal siblings and a rising score are each caught."""
    with pytest.raises(AssertionError, match=named):
        check_tree(tree, GrowthLimits(max_branching=3, max_depth=4), 8)


def exhaustive_best(sequences, limit, max_nodes):
    """The best tree over every match length without leaving any out; equal trees: the longer match."""
    best, text = DraftTree(), sequences[-1]
    for length in range(min(DEPTH - 1, len(text)), 0, -1):
        if len(ends(sequences, text[-length:])) > 1:
            affordable = int(min(max_nodes, limit.spec_factor * length + 1e-6))
            tree = scanned_tree(sequences, text[-length:], limit, affordable)
            best = tree if tree.expected_accepted > best.expected_accepted else best
    return best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), limits, st.integers(0, 10))
def test_the_best_match_length_is_found(text, limit, max_nodes):
    """Stopping early finds the tree that trying every match length finds, within `spec_factor` times its length."""
    index = index_of([text])
    found = best_tree(index, index.suffix_matches(), limit, max_nodes)
    tree = DraftTree() if found is None else found[0]
    assert tree == exhaustive_best([text], limit, max_nodes)


def test_a_longer_match_is_not_always_best():
    """Negative control for the choice of length: here the longest match expects less than a shorter one."""
    text = [7, 8, 4, 8, 5, 6, 8, 5, 6, 8, 5, 6, 7, 8, 9, 7, 8]
    index, limit = index_of([text]), GrowthLimits(max_branching=1, max_depth=4, spec_factor=9.0)
    longest = next(index.suffix_matches())[1]
    best, _ = best_tree(index, index.suffix_matches(), limit, 4)
    assert best.expected_accepted > grow_tree(index, longest, limit, 4).expected_accepted
    assert best == exhaustive_best([text], limit, 4)


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
        if count > 1:
            parents = [c - 1 for c in range(1, count)] if branching == 1 else found.parents[r, 1:count].tolist()
            tree = DraftTree(
                tuple(found.token_ids[r, 1:count].tolist()),
                tuple(parents),
                speculator.draft_scores(str(slot))[: count - 1],
            )
            check_tree(tree, GrowthLimits(max_branching=branching, max_depth=num_drafts, min_score=0.1), num_drafts)
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
