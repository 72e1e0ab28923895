"""Draft trees grown from a suffix index, against the definition evaluated by reading all the texts."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.speculators import suffix_tree
from specround.speculators.suffix_index import SuffixIndex
from specround.speculators.suffix_tree import DraftTree, GrowthLimits, best_tree, grow_tree

DEPTH = 5
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
