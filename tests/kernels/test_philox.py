"""The noise stream, part of the public contract: Philox4x32-10 by its published vectors and in Python integers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import property_settings

from specround.kernels.acceptance.philox import (
    STREAM_COIN,
    STREAM_DRAFT,
    STREAM_MATCH,
    gumbel_noise,
    philox4x32,
    uniform_noise,
)

PUBLISHED = [
    ("00000000 00000000", "00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Known-answer vectors of Random123 (key, counter, output) for philox4x32 with 10 rounds."""


def python_philox(key: list[int], counter: list[int], rounds: int = 10) -> list[int]:
    """Philox4x32 in unbounded integers, written from the paper: multiply, split, exchange, add the Weyl sequence."""
    for i in range(rounds):
        k = [(key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32]
        high_a, low_a = divmod(0xD2511F53 * counter[0], 2**32)
        high_b, low_b = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high_b ^ counter[1] ^ k[0], low_b, high_a ^ counter[3] ^ k[1], low_a]
    return counter


def tensor_philox(key: list[int], counter: list[int]) -> list[int]:
    """The op on scalars."""
    words = [torch.tensor(word) for word in key + counter]
    return [int(word) for word in philox4x32((words[0], words[1]), (words[2], words[3], words[4], words[5]))]


@pytest.mark.parametrize(("key", "counter", "output"), PUBLISHED)
def test_published_vectors(key: str, counter: str, output: str) -> None:
    """Both implementations give the published answers; nine or eleven rounds do not (control)."""
    k, c, wanted = ([int(word, 16) for word in text.split()] for text in (key, counter, output))
    assert tensor_philox(k, c) == wanted
    assert python_philox(k, c) == wanted
    assert python_philox(k, c, 9) != wanted
    assert python_philox(k, c, 11) != wanted


WORD = st.integers(0, 2**32 - 1)


@given(st.lists(WORD, min_size=2, max_size=2), st.lists(WORD, min_size=4, max_size=4))
@property_settings(200)
def test_equals_unbounded_integers(key: list[int], counter: list[int]) -> None:
    """64-bit wrap-around products give the same words as unbounded integers, for any key and counter."""
    assert tensor_philox(key, counter) == python_philox(key, counter)


def exact_uniform(seed: int, token: int, vocabulary_id: int, stream: int) -> Fraction:
    """The contract's sentence, literally, for a seed of any size and sign."""
    seed %= 2**64
    counter = [token % 2**32, token >> 32, vocabulary_id >> 2, stream]
    word = python_philox([seed % 2**32, seed >> 32], counter)[vocabulary_id & 3]
    return (Fraction(word >> 9) + Fraction(1, 2)) / 2**23


def signed(seed: int) -> int:
    """A seed of any size mod 2^64 as a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


SEED = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, -1, 2**63, 2**64 - 1, -(2**63), 2**32]))
TOKEN = st.one_of(st.integers(0, 5000), st.integers(2**32 - 2, 2**40), st.just(2**62))
STREAM = st.sampled_from([STREAM_MATCH, STREAM_DRAFT, STREAM_COIN])


@given(st.lists(st.tuples(SEED, TOKEN), min_size=1, max_size=4), st.integers(1, 23), STREAM)
@property_settings(100)
def test_uniform_noise_is_the_contract_literally(rows: list[tuple[int, int]], size: int, stream: int) -> None:
    """Key, counter layout, output word and scaling, bit for bit: negative and huge seeds, tokens past 2^32."""
    seeds = torch.tensor([signed(seed) for seed, _ in rows])
    found = uniform_noise(seeds, torch.tensor([token for _, token in rows]), size, stream)
    assert found.dtype == torch.float32
    for row, (seed, token) in zip(found.tolist(), rows, strict=True):
        wanted = [exact_uniform(seed, token, i, stream) for i in range(size)]
        assert [Fraction(value) for value in row] == wanted


@pytest.mark.parametrize("change", ["seed high", "seed low", "token high", "token low", "stream", "word"])
def test_every_part_of_key_and_counter_matters(change: str) -> None:
    """Negative control: leaving any part of key or counter out changes the stream, so the comparison above is sharp."""
    seed, token, i, stream = 0x1234567890ABCDEF, (7 << 32) + 9, 6, STREAM_DRAFT
    other = {
        "seed high": (seed % 2**32, token, i, stream),
        "seed low": (seed >> 32 << 32, token, i, stream),
        "token high": (seed, token % 2**32, i, stream),
        "token low": (seed, token >> 32 << 32, i, stream),
        "stream": (seed, token, i, STREAM_MATCH),
        "word": (seed, token, i ^ 1, stream),
    }[change]
    assert exact_uniform(*other) != exact_uniform(seed, token, i, stream)


def test_the_interval_is_open_and_exact_in_float32() -> None:
    """The extreme words give 2^-24 and 1 - 2^-24, so both logarithms of the Gumbel transform are finite."""
    for word in (0, 2**32 - 1):
        exact = (Fraction(word >> 9) + Fraction(1, 2)) / 2**23
        value = (torch.tensor(word >> 9).to(torch.float32) + 0.5) * 2.0**-23
        assert Fraction(float(value)) == exact
        assert 0 < exact < 1
        assert torch.isfinite(-torch.log(-torch.log(value)))


def test_gumbel_noise_is_the_transform_of_the_uniform_noise() -> None:
    """`-log(-log(u))` within float32 rounding of the double-precision value, finite, with the mean of a Gumbel."""
    seeds, index = torch.arange(50), torch.arange(50) * 3
    uniform, gumbel = uniform_noise(seeds, index, 997, STREAM_MATCH), gumbel_noise(seeds, index, 997)
    exact = -torch.log(-torch.log(uniform.double()))
    assert (gumbel.double() - exact).abs().max() <= 2e-6
    assert abs(float(gumbel.mean()) - 0.5772156649) < 5 * math.pi / math.sqrt(6 * gumbel.numel())
    assert torch.equal(gumbel, gumbel_noise(seeds, index, 997, STREAM_MATCH))
    assert not torch.equal(gumbel, gumbel_noise(seeds, index, 997, STREAM_DRAFT))


@pytest.mark.parametrize("size", [1, 3, 8, 33, 1001])
def test_noise_does_not_depend_on_batch_or_vocabulary_size(size: int) -> None:
    """A row's noise has the same bits alone, anywhere in a batch, and as a prefix of a larger vocabulary's."""
    generator = torch.Generator().manual_seed(size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (37,), generator=generator)
    index = torch.randint(0, 2**40, (37,), generator=generator)
    together = gumbel_noise(seeds, index, size)
    for m in range(37):
        assert torch.equal(gumbel_noise(seeds[m : m + 1], index[m : m + 1], size)[0], together[m])
    assert torch.equal(gumbel_noise(seeds, index, size + 5)[:, :size], together)
