"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The stream is part of the public contract: a token's noise depends on the request's seed, the token's index in the
request and its vocabulary id, and on nothing else, so drafts, trees, budgets and batches cannot change a seeded text.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAM_MATCH = 0
"""Stream of the `match` rule and of drafters that sample."""
STREAM_DRAFT = 1
"""Stream of drafts for rejection rules."""
STREAM_COIN = 2
"""Stream of acceptance coins (vocabulary id = column)."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32.

    Args:
        key: Two int64 tensors holding 32-bit words.
        counter: Four int64 tensors holding 32-bit words; all six broadcast together.

    Returns:
        Four int64 tensors with 32-bit words.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [hex(int(word)) for word in philox4x32((zero, zero), (zero, zero, zero, zero))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    key0, key1 = key
    word0, word1, word2, word3 = counter
    for _ in range(10):
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        word0, word1 = high1 ^ word1 ^ key0, product1 & _LOW
        word2, word3 = high0 ^ word3 ^ key1, product0 & _LOW
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return word0, word1, word2, word3


def uniform_noise(seeds: Tensor, token_index: Tensor, size: int, stream: int) -> Tensor:
    """Uniform values in the open interval (0, 1), exact in float32.

    Args:
        seeds: `[M]` int64, seed mod 2^64 as a signed integer.
        token_index: `[M]` integer, index of the token in its request.
        size: Number of ids; value i belongs to vocabulary id i.
        stream: `STREAM_MATCH`, `STREAM_DRAFT` or `STREAM_COIN`.

    Returns:
        `[M, size]` float32: `((x >> 9) + 0.5) * 2^-23` of the id's 32-bit word x.
    """
    seeds, index = seeds[:, None], token_index.to(torch.int64)[:, None]
    groups = torch.arange((size + 3) // 4, device=seeds.device)[None]
    key = (seeds & _LOW, (seeds >> 32) & _LOW)
    counter = (index & _LOW, (index >> 32) & _LOW, groups, torch.full_like(groups, stream))
    words = torch.stack(philox4x32(key, counter), -1).flatten(1)[:, :size]
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel_noise(seeds: Tensor, token_index: Tensor, size: int, stream: int = STREAM_MATCH) -> Tensor:
    """Standard Gumbel noise `[M, size]` float32; arguments as for `uniform_noise`.

    `argmax(logits + gumbel)` is a draw from `softmax(logits)` (Gumbel-max).
    """
    return -torch.log(-torch.log(uniform_noise(seeds, token_index, size, stream)))
