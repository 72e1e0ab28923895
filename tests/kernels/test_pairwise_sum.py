"""The sum that recurrent steps use: its order depends on the length alone."""

from __future__ import annotations

import pytest
import torch

from specround.kernels.state_walk import sum_pairwise


def by_halves(terms: list[torch.Tensor]) -> torch.Tensor:
    """The upper half is added to the lower one, the middle of an odd length is carried."""
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms = [terms[i] + terms[half + i] if half + i < len(terms) else terms[i] for i in range(half)]
    return terms[0]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 129])
def test_the_order_of_additions_is_halves(length: int) -> None:
    """Bit for bit the sum by halves, for any batch around it."""
    terms = torch.randn(5, length, 3, generator=torch.Generator().manual_seed(length))
    expected = by_halves(list(terms.unbind(1)))
    assert torch.equal(sum_pairwise(terms.clone(), 1), expected)
    assert torch.equal(sum_pairwise(terms[:1].clone(), 1), expected[:1])


def test_another_order_is_noticed() -> None:
    """Negative control: one addition after the other gives other bits on the same terms."""
    terms = torch.randn(64, 129, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.zeros(64)
    for column in terms.unbind(1):
        one_by_one = one_by_one + column
    assert not torch.equal(sum_pairwise(terms.clone(), 1), one_by_one)
