"""The Triton tree attention against the float64 loop and the naive op, with every slot of nobody poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_cases
import pytest
import torch
from attention_cases import Request, Row, Setting, build, chunk, error, masked, tree
from triton_cases import BUSHY, DEEP, attend, idle_case, launch, mixed_case, rows_of, run

from specround.contract import KernelError
from specround.kernels.tree_attention.launch import LaunchShape, choose_shape
from specround.kernels.tree_attention.rows import AttentionRows

TOLERANCE = 1e-5
CONTROL = 100 * TOLERANCE
SETTINGS = [
    (Setting(kv_heads=1), launch(16, 16, 1)),
    (Setting(block_size=1, window=7, key_dim=20, value_dim=5), launch(64, 16, 1)),
    (Setting(block_size=64, window=3, sinks=True, softcap=2.0, repeats=3), launch(64, 32, 2)),
    (Setting(block_size=16, kv_heads=1, repeats=1, window=1), launch(32, 16, 3)),
    (Setting(kv_heads=1, repeats=17, sinks=True), launch(64, 16, 3)),
    (Setting(kv_heads=1, repeats=5, softcap=2.0, window=50, key_dim=33, value_dim=17), launch(128, 64, 5)),
]


@pytest.fixture(autouse=True, scope="module")
def _poisoned_outputs() -> Iterator[None]:
    """Every tensor that an op allocates without filling it starts as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize(("setting", "shape"), SETTINGS)
def test_equals_the_loop_oracle(setting: Setting, shape: LaunchShape, device: torch.device) -> None:
    """Prompts, chains, trees and masks in one ragged batch, every layer feature, tile size and number of splits.

    Equal to listed keys in float64 and to the naive op; unused rows are finite.
    """
    case = mixed_case(setting)
    found = run(case, device, shape)
    assert found.isfinite().all()
    assert error(found, case) <= TOLERANCE
    naive = attention_cases.run(case)
    assert (found - naive)[case.used_rows].abs().max() <= TOLERANCE * naive.abs().max()


@pytest.mark.parametrize("splits", [1, 4])
def test_equal_row_counts(splits: int, device: torch.device) -> None:
    """A uniform decode step finds its tiles without a search: trees of 20 rows over contexts of other lengths."""
    case = build([tree(21, DEEP), tree(40, DEEP), tree(0, DEEP)], Setting(window=30), 6)
    assert error(run(case, device, launch(16, 16, splits)), case) <= TOLERANCE
    decode = build([chunk(length, 1) for length in (0, 33, 70)], Setting(), 7)
    assert error(run(decode, device, launch(16, 16, splits)), decode) <= TOLERANCE


def test_all_64_columns_are_seen(device: torch.device) -> None:
    """A star in which every row sees the root and itself, and a mask, each of 64 columns: the sign bit is a column.

    Without that bit the result is another (control).
    """
    case = build([tree(21, [-1] + [0] * 63), masked(0, 64, random.Random(5))], Setting(kv_heads=1, repeats=1), 9)
    assert case.context.bits is not None
    assert (case.context.bits < 0).nonzero().flatten().tolist() == [63, 127], "the last rows see the last column"
    found = run(case, device, launch(32, 16, 2))
    assert error(found, case) <= TOLERANCE
    naive = attention_cases.run(case)
    assert (found - naive).abs().max() <= TOLERANCE * naive.abs().max()
    assert error(run(case, device, launch(32, 16, 2), bits=case.context.bits & 2**63 - 1), case) > CONTROL


def test_requests_without_rows(device: torch.device) -> None:
    """Requests that run no row in this step take part in nothing, and a step may hold no rows at all."""
    case = idle_case(Setting(kv_heads=1))
    assert error(run(case, device, launch()), case) <= TOLERANCE
    nothing = build(case.requests[:1], Setting(), 0)
    assert run(nothing, device).shape == (0, 4, 6)


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_equal_counts_but_for_a_request_without_rows(idle: int, device: torch.device) -> None:
    """Counts such as (0, 4, 4) and (4, 0, 4) are not uniform, wherever the request without rows is."""
    requests = [tree(6, BUSHY[:4]), chunk(9, 4)]
    requests.insert(idle, Request([], 3, [0, 1, 2]))
    case = build(requests, Setting(kv_heads=1), 4)
    assert sorted(case.num_rows) == [0, 4, 4]
    assert error(run(case, device, launch()), case) <= TOLERANCE


def test_chains_need_no_bits(device: torch.device) -> None:
    """Without bits and offsets a chunk and chains are seen by context length alone, under a window too."""
    case = build([chunk(30, 9), chunk(3, 1), chunk(0, 20)], Setting(window=11), 2)
    assert case.context.bits is None
    assert error(run(case, device, launch(32, 16, 2)), case) <= TOLERANCE


def test_columns_sit_at_their_index_without_offsets(device: torch.device) -> None:
    """`key_offsets=None` means offset j in column j, under a window."""
    chain = [set(range(c + 1)) for c in range(9)]
    case = build([attention_cases.plan_rows(12, chain, list(range(9)))], Setting(window=4), 2)
    assert error(run(case, device, launch(), key_offsets=None), case) <= TOLERANCE


def test_a_window_holds_keys_whose_slots_are_far_below(device: torch.device) -> None:
    """Positions that jump far ahead of their slots: a tile of one row looks for keys from the root's slot on.

    No column's slot is in the window of its row, its logical position is.
    """
    seen = [set(range(c + 1)) for c in range(7)]
    request = attention_cases.plan_rows(12, seen, [0] + [40 + c for c in range(6)])
    case = build([request], Setting(kv_heads=1, repeats=16, window=3), 2)
    assert all(row.position - (12 + c) >= 3 for c, row in enumerate(request.rows) if c)
    found = run(case, device, launch(16, 16))
    assert error(found, case) <= TOLERANCE
    naive = attention_cases.run(case)
    assert (found - naive).abs().max() <= TOLERANCE * naive.abs().max()


def test_a_broken_ancestor_mask_is_seen(device: torch.device) -> None:
    """Negative control: plan rows that see every earlier column, as in a chain, exceed 100 x the tolerance."""
    case = build([tree(21, DEEP), masked(13, 12, random.Random(1))], Setting(), 3)
    columns = torch.cat([torch.arange(20), torch.arange(12)])
    assert error(run(case, device, launch()), case) <= TOLERANCE
    assert error(run(case, device, launch(), bits=2 ** (columns + 1) - 1), case) > CONTROL


def test_row_numbers_instead_of_depths_are_seen_under_a_window(device: torch.device) -> None:
    """Negative control: measuring a window by row number, on either side, exceeds 100 x the tolerance."""
    case = build([tree(21, [-1, 0, 0, 0, 0, 4, 5, 6])], Setting(window=3), 5)
    columns = torch.arange(8)
    assert error(run(case, device, launch()), case) <= TOLERANCE
    assert error(run(case, device, launch(), positions=21 + columns), case) > CONTROL
    assert error(run(case, device, launch(), key_offsets=columns[None]), case) > CONTROL


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_outside_is_read(splits: int, device: torch.device) -> None:
    """NaN in the null block or in the queries of unused rows changes no bit elsewhere; a held NaN is seen (control)."""
    case = mixed_case(Setting(kv_heads=1, sinks=True, window=9))
    found = run(case, device, launch(64, 16, splits))
    poisoned = replace(case, query=case.query.clone(), key_cache=case.key_cache.clone())
    unused = sorted(set(range(len(case.query))) - set(case.used_rows))
    poisoned.query[unused], poisoned.key_cache[0] = float("nan"), float("nan")
    assert torch.equal(run(poisoned, device, launch(64, 16, splits)), found)
    assert (found[unused] == 0).all(), "rows that see nothing are zero"
    further = case.context.kv_len + 1
    longer = case.context.context_len + 1
    assert error(run(case, device, launch(64, 16, splits), kv_len=further, context_len=longer), case) == float("inf")
    assert error(run(case, device, launch(64, 16, splits), context_len=longer + 70, bits=None), case) < float("inf")


@pytest.mark.parametrize("count", [7, 8], ids=["part of a tile", "a whole tile"])
def test_rows_that_claim_more_than_is_held(count: int, device: torch.device) -> None:
    """Rows whose `context_len` lies past `kv_len`, all rows of a tile alike, see what is held: NaN follows it."""
    case = build([Request([Row(list(range(13)), 12, 18)] * count, 13, list(range(13)))], Setting(kv_heads=1), 1)
    assert error(run(case, device, launch(16, 16)), case) <= TOLERANCE


def test_positions_past_the_block_table_are_not_read(device: torch.device) -> None:
    """Rows whose `context_len` and `kv_len` reach past the table's slots see what it holds and no more.

    The next columns in memory are blocks of NaN, which rows of the whole table do see (control).
    """
    requests = [Request([Row(list(range(12)), 11, 18)] * count, 12, list(range(12))) for count in (3, 1)]
    case = build(requests, Setting(), 1)
    tables, further = case.context.block_tables.to(device), torch.tensor([10**6] * 2)
    assert tables.shape == (2, 5)
    assert error(run(case, device, launch(), block_tables=tables[:, :3], kv_len=further), case) <= TOLERANCE
    assert error(run(case, device, launch(), block_tables=tables, kv_len=further), case) == float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [{}, {"sinks": True, "softcap": 2.0}])
def test_16_bit(dtype: torch.dtype, features: dict[str, Any], device: torch.device) -> None:
    """In 16-bit types the op keeps the query's dtype and stays within a few units in the last place of the oracle.

    A float32 query over a 16-bit cache is computed in float32.
    """
    case = mixed_case(Setting(kv_heads=1, window=5, **features))
    cached = replace(case, key_cache=case.key_cache.to(dtype), value_cache=case.value_cache.to(dtype))
    low = replace(cached, query=case.query.to(dtype))
    found = run(low, device, launch(64, 16, 2))
    assert found.dtype == dtype
    assert error(found, low) <= 6 * torch.finfo(dtype).eps
    if not features:
        assert error(run(cached, device, launch(64, 16)), cached) <= TOLERANCE


def test_caches_and_queries_may_be_views(device: torch.device) -> None:
    """Keys and values may be halves of one tensor, and queries transposed; nothing is copied before."""
    case = mixed_case(Setting(kv_heads=2, key_dim=8, value_dim=8))
    pool = torch.cat([case.key_cache, case.value_cache], -1).to(device)
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    viewed = replace(case, query=query, key_cache=pool[..., :8], value_cache=pool[..., 8:])
    assert not viewed.key_cache.is_contiguous()
    rows, shape = rows_of(case), launch(64, 16)
    assert torch.equal(attend(viewed, rows, device, shape), attend(case, rows, device, shape))


def test_tables_and_offsets_may_be_columns_of_wider_ones(device: torch.device) -> None:
    """Rows of block tables and of key offsets may lie further apart than they are long."""
    case = mixed_case(Setting(kv_heads=1, window=5))
    tables, offsets = case.context.block_tables, case.context.key_offsets
    assert offsets is not None
    wide = [
        torch.cat([part, torch.full_like(part, filler)], 1).to(device) for part, filler in ((tables, 0), (offsets, 50))
    ]
    views = {"block_tables": wide[0][:, : tables.shape[1]], "key_offsets": wide[1][:, : offsets.shape[1]]}
    assert not any(view.is_contiguous() for view in views.values())
    found = run(case, device, launch(64, 16), **views)
    assert error(found, case) <= TOLERANCE
    assert torch.equal(found, run(case, device, launch(64, 16)))


def test_the_shape_is_chosen_from_host_values(device: torch.device) -> None:
    """The default launch is right, and its tiles hold every query head of a key head, whatever their number."""
    case = mixed_case(Setting(repeats=3))
    assert error(run(case, device), case) <= TOLERANCE
    for counts, repeats in (((1,) * 64, 4), ((16,), 71), ((5, 300), 1), ((0, 0), 8)):
        rows = AttentionRows(case.context, counts, (8192,) * len(counts))
        shape = choose_shape(
            rows, key_heads=8, repeats=repeats, width=256, element_size=2, window=None, device=torch.device("cpu")
        )
        assert shape.block_rows >= repeats
        assert 1 <= shape.num_splits <= 2, "there is one processor"


def test_the_shape_holds_every_query_head_of_wide_key_heads(device: torch.device) -> None:
    """Heads so wide that 16 rows are the most a tile should have still get tiles for more than 16 query heads."""
    setting = Setting(kv_heads=1, repeats=17, key_dim=260, value_dim=20)
    case = build([tree(6, BUSHY), chunk(9, 2)], setting, 8)
    assert error(run(case, device), case) <= TOLERANCE
    for repeats, rows in ((8, 16), (16, 16), (17, 32), (71, 128)):
        shape = choose_shape(
            rows_of(case),
            key_heads=1,
            repeats=repeats,
            width=1024,
            element_size=2,
            window=None,
            device=torch.device("cpu"),
        )
        assert shape.block_rows == rows


def test_other_types_are_refused(device: torch.device) -> None:
    """A float64 query is refused by name."""
    case = build([chunk(3, 1)], Setting(), 0)
    with pytest.raises(KernelError, match=r"query\.dtype=torch\.float64: must be one of torch\.float32, "):
        run(replace(case, query=case.query.double()), device)
