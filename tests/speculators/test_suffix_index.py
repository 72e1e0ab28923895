"""The suffix index against a scan of the texts: counts, continuations, removal, and the cache of finished requests."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specround.speculators.suffix_index import RequestCache, SuffixIndex

texts = st.lists(st.lists(st.integers(0, 2), max_size=18), max_size=4)
depths = st.integers(2, 5)


class Scan:
    """The same questions as `SuffixIndex`, answered by reading every text from start to end."""

    def __init__(self, sequences, max_depth):
        self.sequences = sequences
        self.max_depth = max_depth

    def ends(self, string):
        """(sequence, end) of each occurrence, oldest first."""
        size = len(string)
        return [
            (number, start + size)
            for number, text in enumerate(self.sequences)
            for start in range(len(text) - size + 1)
            if text[start : start + size] == list(string)
        ]

    def continuations(self, string):
        """(token, count) after a string, larger counts first, then the more recent."""
        string = list(string)
        if len(string) == self.max_depth and len(self.ends(string)) > 1:
            string = string[1:]
        after = {}
        for number, end in self.ends(string):
            if end < len(self.sequences[number]):
                after.setdefault(self.sequences[number][end], []).append((number, end))
        counted = [(len(places), places[-1], token) for token, places in after.items()]
        return [(token, count) for count, _, token in sorted(counted, reverse=True)]


def check_against_scan(index, sequences, max_depth, alphabet, max_children):
    """Every string up to `max_depth` tokens has the count and the continuations a scan finds."""
    scan = Scan(sequences, max_depth)
    for size in range(1, max_depth + 1):
        for string in itertools.product(alphabet, repeat=size):
            position = index.match(string)
            assert index.count(string) == len(scan.ends(string)), string
            assert (position is None) == (not scan.ends(string))
            if position is not None:
                followed, found = index.continuations(position)
                expected = scan.continuations(string)
                assert followed == sum(count for _, count in expected), string
                assert [(token, count) for count, _, token, _ in found] == expected[:max_children], string


def built(sequences, max_depth, max_children=9, cls=SuffixIndex):
    """An index of sequences with keys "0", "1", ..."""
    index = cls(max_depth, max_children)
    for number, text in enumerate(sequences):
        index.add(str(number), text)
    return index


class DropsFirstOccurrence(SuffixIndex):
    """Broken: forgets how a string that now occurs twice went on the first time."""

    def _unfold(self, earlier, here, suffix, inner):
        node = super()._unfold(earlier, here, suffix, inner)
        if node.children:
            node.children.clear()
        return node


class RanksLast(SuffixIndex):
    """Broken: a child that was counted just now goes to the end of the ranking."""

    def _rerank(self, ranked, children, token):
        ranked[:] = [*(other for other in ranked if other != token), token][: self._max_children]


class ForgetsLastStart(SuffixIndex):
    """Broken: removal leaves the suffix that starts at a text's last token."""

    def _forget_prefixes(self, number, tokens):
        if len(tokens) > 1:
            super()._forget_prefixes(number, tokens)


@settings(max_examples=150, deadline=None)
@given(texts, depths, st.integers(1, 3))
def test_counts_and_continuations_equal_a_scan(sequences, max_depth, max_children):
    """Counts, continuation counts, totals and the order of ties are those of a scan, for every string."""
    check_against_scan(built(sequences, max_depth, max_children), sequences, max_depth, range(3), max_children)


def test_the_scan_catches_a_lost_occurrence():
    """Negative control: an index that loses a first occurrence fails the comparison with the scan."""
    sequences = [[0, 1, 2, 0, 1, 0]]
    check_against_scan(built(sequences, 3), sequences, 3, range(3), 9)
    with pytest.raises(AssertionError):
        check_against_scan(built(sequences, 3, cls=DropsFirstOccurrence), sequences, 3, range(3), 9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=5), depths, st.integers(1, 3))
def test_incremental_equals_batch(parts, max_depth, max_children):
    """Extending token by token, with queries in between, gives the index that one call gives."""
    index = SuffixIndex(max_depth, max_children)
    index.add("0", [])
    for token in itertools.chain(*parts):
        index.extend([token])
        for _, position in index.suffix_matches():
            index.continuations(position)
    whole = list(itertools.chain(*parts))
    check_against_scan(index, [whole], max_depth, range(3), max_children)
    assert index.num_strings() == built([whole], max_depth).num_strings()


def check_ranking(cls, tokens, max_children):
    """After one query of a string with many continuations, its ranking stays that of a scan."""
    text = [token for other in range(1, 25) for token in (0, other)]
    index = built([text], 3, max_children, cls)
    for token in tokens:
        index.continuations(index.match([0]))
        index.extend([0, token])
        text += [0, token]
        _, found = index.continuations(index.match([0]))
        expected = Scan([text], 3).continuations([0])[:max_children]
        assert [(token, count) for count, _, token, _ in found] == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 5))
def test_the_maintained_ranking_equals_a_scan(tokens, max_children):
    """Strings with so many continuations that the best are kept ranked report what a scan reports."""
    check_ranking(SuffixIndex, tokens, max_children)


def test_the_scan_catches_a_wrong_ranking():
    """Negative control: an index that ranks a new count last fails the comparison with the scan."""
    with pytest.raises(AssertionError):
        check_ranking(RanksLast, [5, 5, 9], 2)


def test_a_ranked_string_is_not_scanned_again():
    """After its first query, reading a string's best continuations touches only those: no work per continuation."""

    class NoScan(dict):
        def items(self):
            raise AssertionError("scanned")

    index = built([[token for other in range(1, 40) for token in (0, other)]], 3, 2)
    node = index.match([0])
    before = index.continuations(node)
    node.children = NoScan(node.children)
    assert index.continuations(node) == before
    node.ranked = None
    with pytest.raises(AssertionError, match="scanned"):
        index.continuations(node)


@settings(max_examples=150, deadline=None)
@given(texts, depths, st.data())
def test_removal_equals_a_rebuilt_index(sequences, max_depth, data):
    """After removing any sequences in any order the index answers, and holds, what one of the others alone does."""
    index = built(sequences, max_depth)
    gone = data.draw(st.lists(st.sampled_from(range(len(sequences))), unique=True) if sequences else st.just([]))
    for number in gone:
        index.remove(str(number))
    left = [text for number, text in enumerate(sequences) if number not in gone]
    check_against_scan(index, left, max_depth, range(3), 9)
    assert index.num_strings() == built(left, max_depth).num_strings()


def test_removal_then_more_sequences_equals_a_rebuilt_index():
    """Sequences added after a removal count as if the removed one had never been there."""
    index = built([[0, 1, 0, 1], [0, 1, 2]], 4)
    index.remove("0")
    index.add("2", [1, 2, 0, 1, 2])
    left = [[0, 1, 2], [1, 2, 0, 1, 2]]
    check_against_scan(index, left, 4, range(3), 9)
    assert index.num_strings() == built(left, 4).num_strings()


def test_the_scan_catches_an_incomplete_removal():
    """Negative control: a removal that leaves one suffix behind fails the comparison with the rebuilt index."""
    index = built([[0, 1, 0], [0, 2]], 3, cls=ForgetsLastStart)
    index.remove("0")
    with pytest.raises(AssertionError):
        check_against_scan(index, [[0, 2]], 3, range(3), 9)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=25), st.lists(st.integers(0, 2), max_size=8), depths)
def test_matches_are_all_suffixes_that_occur(text, context, max_depth):
    """The matched lengths are exactly those a scan finds, longest first, in the own text and in other texts."""
    index, scan = built([text], max_depth), Scan([text], max_depth)
    own = [size for size in range(1, min(max_depth, len(text) + 1)) if len(scan.ends(text[-size:])) > 1]
    assert [size for size, _ in index.suffix_matches()] == own[::-1]
    assert all(index.match(text[-size:]) is position for size, position in index.suffix_matches())
    other = [size for size in range(1, min(max_depth, len(context) + 1)) if scan.ends(context[-size:])]
    assert [size for size, _ in index.context_matches(context)] == other[::-1]


@pytest.mark.parametrize("loop", [[3], [3, 4], [0, 1, 2]])
def test_loops_stay_small_and_continue_without_end(loop):
    """A loop holds at most `max_depth` strings per period, and is continued for as long as one asks."""
    max_depth = 8
    index = built([loop * 40], max_depth)
    assert index.num_strings() <= max_depth * len(loop) + max_depth
    _, position = next(index.suffix_matches())
    walked = []
    for _ in range(5 * max_depth):
        _, ((_, _, token, position), *_) = index.continuations(position)
        walked.append(token)
    assert walked == (loop * 5 * max_depth)[: len(walked)]


def test_a_string_that_occurs_once_is_continued_as_its_text():
    """Past `max_depth`, a context that occurs once goes on to the end of its text and then stops."""
    index = built([list(range(20))], 3)
    position, walked = index.match([0]), []
    while (found := index.continuations(position))[0]:
        ((_, _, token, position),) = found[1]
        walked.append(token)
    assert walked == list(range(1, 20))
    assert index.continuations(position) == (0, [])


def test_misuse_is_refused():
    """A second sequence under a key, extending when none is open, and removing an unknown key are errors."""
    index = built([[1, 2]], 3)
    with pytest.raises(ValueError, match="already"):
        index.add("0", [1])
    index.remove("0")
    with pytest.raises(ValueError, match="open"):
        index.extend([1])
    with pytest.raises(KeyError):
        index.remove("0")


uses = st.tuples(st.sampled_from("abcde"), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(uses, max_size=12))
def test_cache_keeps_the_most_recently_used(max_requests, events):
    """The cache holds what a list kept in order of use holds, and its index equals one rebuilt from those texts."""
    cache = RequestCache(max_requests, max_depth=4, max_children=9)
    order, texts_kept = [], {}
    for name, text, use in events:
        if use and name in order:
            position = cache.index.match(texts_kept[name][:4])
            cache.touch(position)
            used = cache.index.latest_key(position)
            order.append(order.pop(order.index(used)))
        elif not use:
            order = [*(other for other in order if other != name), name][-max_requests:]
            texts_kept.pop(name, None)
            texts_kept[name] = text
            texts_kept = {other: kept for other, kept in texts_kept.items() if other in order}
            cache.add(name, text)
        assert cache.request_ids == tuple(order)
    left = list(texts_kept.values())
    check_against_scan(cache.index, left, 4, range(3), 9)
    assert cache.index.num_strings() == built(left, 4).num_strings()


def test_using_a_request_changes_who_leaves():
    """Negative control for the order of use: without the touch the other request leaves."""
    kept = []
    for use in (False, True):
        cache = RequestCache(2, max_depth=4, max_children=2)
        cache.add("a", [1, 2])
        cache.add("b", [3, 4])
        if use:
            cache.touch(cache.index.match([1]))
        cache.add("c", [5, 6])
        kept.append(cache.request_ids)
    assert kept == [("b", "c"), ("a", "c")]
