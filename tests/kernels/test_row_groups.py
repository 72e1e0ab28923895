"""Grouping of requests for batched attention calls: a cover in order, with bounded padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import property_settings

from specround.kernels.tree_attention.rows import group_requests

COUNTS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 5000)), max_size=40)


def padded_and_real(groups: list[tuple[int, int]], counts: list[int]) -> list[tuple[int, int]]:
    """Rows computed and rows asked for, by group."""
    return [(max(counts[a:b]) * (b - a), sum(counts[a:b])) for a, b in groups]


@given(COUNTS)
@property_settings(200)
def test_groups_cover_requests_in_order_and_pad_at_most_twofold(counts: list[int]) -> None:
    """Groups are non-empty, contiguous, in batch order, cover every request once, and at most double the rows."""
    groups = group_requests(counts)
    assert [i for start, stop in groups for i in range(start, stop)] == list(range(len(counts)))
    assert all(start < stop for start, stop in groups)
    assert all(padded <= 2 * real for padded, real in padded_and_real(groups, counts))


@given(st.integers(1, 5000), st.integers(1, 50))
@property_settings(50)
def test_equal_counts_make_one_group_without_padding(count: int, size: int) -> None:
    """A uniform decode step is one batched call."""
    assert group_requests([count] * size) == [(0, size)]


def test_the_padding_bound_is_not_met_by_one_group() -> None:
    """Negative control: one group for everything breaks the bound, so the bound says something."""
    counts = [1, 1, 1, 200]
    padded, real = padded_and_real([(0, 4)], counts)[0]
    assert padded > 2 * real
    assert group_requests(counts) == [(0, 3), (3, 4)]
