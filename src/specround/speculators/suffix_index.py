"""`SuffixIndex`: how often every short string of some token sequences occurs, and what follows it.

Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", arXiv 2411.04975.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

_END_BITS = 40
_END_MASK = (1 << _END_BITS) - 1
_SCAN_LIMIT = 16

Occurrence = int
"""Where a string occurs: sequence number, then the index one past its end. A larger number is more recent."""


class _Node:
    """A string that occurs at least twice. A string that occurs once is only its `Occurrence` in the parent's children.

    Attributes:
        children: The string plus one token, by that token; None at the index's full depth.
        count: Occurrences.
        followed: Occurrences that another token follows, the sum of the children's counts.
        recent: Its last occurrence in each sequence, oldest sequence first.
        suffix: The string without its first token; None for the root.
        ranked: The best children's tokens, kept up to date once a query has asked; None before.
    """

    __slots__ = ("children", "count", "followed", "ranked", "recent", "suffix")

    def __init__(self, recent: list[Occurrence], suffix: _Node | None, inner: bool) -> None:
        self.children: dict[int, _Node | Occurrence] | None = {} if inner else None
        self.count = len(recent)
        self.followed = 0
        self.recent = recent
        self.suffix = suffix
        self.ranked: list[int] | None = None


Position = _Node | Occurrence
"""A string of the index, as `match` finds it. Opaque; valid until the index changes."""

Continuation = tuple[int, Occurrence, int, Position]
"""Count, most recent occurrence, token and position of a string one token longer."""


class SuffixIndex:
    """How often each string of up to `max_depth` tokens occurs in some sequences, and what follows it.

    A depth-limited suffix trie that is unfolded only where strings repeat. One sequence at a time is open and grows. A
    new token costs one dictionary access for each suffix of the open sequence that has occurred before, at most
    `max_depth`; so does a token of a removed sequence. After a string's first query, reading its continuations depends
    neither on the sequences' lengths nor on their number.

    Args:
        max_depth: Longest string counted, >= 2. A context of more than `max_depth - 1` tokens that occurs more than
            once is continued as its last `max_depth - 1` tokens; one that occurs once is continued as its text.
        max_children: Continuations reported per string, >= 1.

    Example:
        >>> index = SuffixIndex(max_depth=4, max_children=2)
        >>> index.add("r1", [7, 8, 9, 7, 8, 5])
        >>> index.count([7, 8]), index.continuations(index.match([8]))[0]
        (2, 2)
    """

    def __init__(self, max_depth: int, max_children: int) -> None:
        self.max_depth = max_depth
        self._max_children = max_children
        self._root = _Node([], None, inner=True)
        self._texts: dict[int, list[int]] = {}
        self._numbers: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._next_number = 0
        self._open = -1
        self._repeated: list[_Node] = []

    def add(self, key: str, tokens: Iterable[int]) -> None:
        """Index one more sequence. It stays open for `extend` until the next `add` or `remove`.

        Raises:
            ValueError: The key is in use.
        """
        if key in self._numbers:
            raise ValueError(f"sequence {key!r} is already in the index")
        number = self._open = self._next_number
        self._next_number += 1
        self._numbers[key], self._keys[number], self._texts[number] = number, key, []
        self._repeated = [self._root]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the open sequence.

        Raises:
            ValueError: No sequence is open.
        """
        if self._open < 0:
            raise ValueError("no sequence is open")
        text = self._texts[self._open]
        for token in tokens:
            text.append(token)
            self._count_suffixes(token, self._open << _END_BITS | len(text))

    def _count_suffixes(self, token: int, here: Occurrence) -> None:
        """Count every suffix that ends in `token` and is one longer than a suffix that had occurred before."""
        longer = [self._root]
        number_start = self._open << _END_BITS
        for node in self._repeated:
            children = node.children
            if children is None:
                break
            node.followed += 1
            child = children.get(token)
            if child is None:
                children[token] = here
            elif isinstance(child, int):
                children[token] = unfolded = self._unfold(child, here, longer[-1], len(longer) < self.max_depth)
                longer.append(unfolded)
            else:
                child.count += 1
                if child.recent[-1] >= number_start:
                    child.recent[-1] = here
                else:
                    child.recent.append(here)
                longer.append(child)
            if node.ranked is not None:
                self._rerank(node.ranked, children, token)
        self._repeated = longer

    def _unfold(self, earlier: Occurrence, here: Occurrence, suffix: _Node, inner: bool) -> _Node:
        """The node of a string that now occurs a second time; its first occurrence moves one token down."""
        same_sequence = earlier >> _END_BITS == here >> _END_BITS
        node = _Node([here] if same_sequence else [earlier, here], suffix, inner)
        node.count = 2
        text, end = self._texts[earlier >> _END_BITS], earlier & _END_MASK
        if node.children is not None and end < len(text):
            node.children[text[end]] = earlier + 1
            node.followed = 1
        return node

    def _rerank(self, ranked: list[int], children: dict[int, Position], token: int) -> None:
        """Move a child that was counted just now to its place: behind larger counts, before equal ones."""
        count = _count(children[token])
        if token in ranked:
            ranked.remove(token)
        place = len(ranked)
        while place > 0 and _count(children[ranked[place - 1]]) <= count:
            place -= 1
        ranked.insert(place, token)
        del ranked[self._max_children :]

    def remove(self, key: str) -> None:
        """Forget a sequence: the index is then as if it had never been added. No sequence is open afterwards.

        Raises:
            KeyError: No such sequence.
        """
        number = self._numbers.pop(key)
        text = self._texts.pop(number)
        del self._keys[number]
        self._open, self._repeated = -1, []
        for start in range(len(text)):
            self._forget_prefixes(number, text[start : start + self.max_depth])

    def _forget_prefixes(self, number: int, tokens: Sequence[int]) -> None:
        node = self._root
        for token in tokens:
            children = node.children
            assert children is not None, "only strings of max_depth tokens have no children"
            node.followed -= 1
            node.ranked = None
            child = children[token]
            if isinstance(child, int):
                del children[token]
                return
            child.count -= 1
            place = bisect_left(child.recent, number << _END_BITS)
            if place < len(child.recent) and child.recent[place] >> _END_BITS == number:
                del child.recent[place]
            if child.count == 0:
                del children[token]
                return
            # One occurrence may still be the removed sequence's own: then `recent` is empty and a later start ends it.
            if child.count == 1 and child.recent:
                children[token] = child.recent[0]
                return
            node = child

    def match(self, tokens: Sequence[int]) -> Position | None:
        """The string's position, or None if it does not occur. At most `max_depth` tokens."""
        position: Position = self._root
        for token in tokens:
            child: Position | None
            if isinstance(position, int):
                child = position + 1 if self._token_after(position) == token else None
            else:
                child = None if position.children is None else position.children.get(token)
            if child is None:
                return None
            position = child
        return position

    def suffix_matches(self) -> Iterator[tuple[int, Position]]:
        """Length and position of each suffix of the open sequence that occurred before, longest first."""
        for length in range(min(len(self._repeated), self.max_depth) - 1, 0, -1):
            yield length, self._repeated[length]

    def context_matches(self, context: Sequence[int]) -> Iterator[tuple[int, Position]]:
        """Length and position of each suffix of some other text that occurs in the index, longest first."""
        for length in range(min(len(context), self.max_depth - 1), 0, -1):
            position = self.match(context[len(context) - length :])
            if position is not None:
                yield length, position

    def continuations(self, position: Position) -> tuple[int, list[Continuation]]:
        """What follows a string.

        Returns:
            How many occurrences are followed by a token, and the most frequent continuations, at most `max_children`:
            larger counts first, then the more recent one.
        """
        if isinstance(position, int):
            token = self._token_after(position)
            return (0, []) if token is None else (1, [(1, position + 1, token, position + 1)])
        node = position
        if node.children is None:
            assert node.suffix is not None, "only the root has no suffix, and it has children"
            node = node.suffix
        children = node.children
        assert children is not None, "only strings of max_depth tokens have no children"
        if node.ranked is not None:
            return node.followed, [_continuation(token, children[token]) for token in node.ranked]
        ordered = [_continuation(token, child) for token, child in children.items()]
        ordered.sort(reverse=True)
        del ordered[self._max_children :]
        if len(children) > _SCAN_LIMIT:
            node.ranked = [token for _, _, token, _ in ordered]
        return node.followed, ordered

    def count(self, tokens: Sequence[int]) -> int:
        """How often a string of at most `max_depth` tokens occurs; for the empty string, 0."""
        position = self.match(tokens)
        return 0 if position is None else _count(position)

    def latest_key(self, position: Position) -> str:
        """Key of the sequence in which the string occurred last."""
        return self._keys[_latest(position) >> _END_BITS]

    def tail(self, length: int) -> list[int]:
        """The last tokens of the open sequence, at most `length`."""
        text = self._texts[self._open]
        return text[max(0, len(text) - length) :]

    def num_strings(self) -> int:
        """Entries in memory, found by walking all of them: for inspection only."""
        total, pending = 0, [self._root]
        while pending:
            children = pending.pop().children or {}
            total += len(children)
            pending.extend(child for child in children.values() if not isinstance(child, int))
        return total

    def _token_after(self, occurrence: Occurrence) -> int | None:
        text, end = self._texts[occurrence >> _END_BITS], occurrence & _END_MASK
        return text[end] if end < len(text) else None


class RequestCache:
    """A `SuffixIndex` over finished requests that drops the least recently used request when it is full.

    A request is used when it is added, and when it is the latest source of the text a draft was grown from.

    Args:
        max_requests: Requests kept, >= 1.
        max_depth: As in `SuffixIndex`.
        max_children: As in `SuffixIndex`.

    Example:
        >>> cache = RequestCache(max_requests=1, max_depth=4, max_children=2)
        >>> cache.add("a", [1, 2])
        >>> cache.add("b", [3, 4])
        >>> cache.request_ids, cache.index.count([1])
        (('b',), 0)
    """

    def __init__(self, max_requests: int, max_depth: int, max_children: int) -> None:
        self.index = SuffixIndex(max_depth, max_children)
        self._max_requests = max_requests
        self._order: OrderedDict[str, None] = OrderedDict()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests kept, least recently used first."""
        return tuple(self._order)

    def add(self, request_id: str, tokens: Iterable[int]) -> None:
        """Keep a request's tokens, in place of what was kept under the same id."""
        self.discard(request_id)
        if len(self._order) == self._max_requests:
            self.discard(next(iter(self._order)))
        self._order[request_id] = None
        self.index.add(request_id, tokens)

    def discard(self, request_id: str) -> None:
        """Forget a request, if it is kept."""
        if request_id in self._order:
            del self._order[request_id]
            self.index.remove(request_id)

    def touch(self, position: Position) -> None:
        """Mark the request in which a string occurred last as used."""
        self._order.move_to_end(self.index.latest_key(position))


def _count(position: Position) -> int:
    return 1 if isinstance(position, int) else position.count


def _latest(position: Position) -> Occurrence:
    return position if isinstance(position, int) else position.recent[-1]


def _continuation(token: int, child: Position) -> Continuation:
    if isinstance(child, int):
        return 1, child, token, child
    return child.count, child.recent[-1], token, child
