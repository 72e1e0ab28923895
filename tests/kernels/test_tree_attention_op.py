"""Tree attention against a float64 loop over explicitly listed keys, with every slot of nobody poisoned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Request, Setting, attend, build, chunk, error, masked, plan_rows, run, tree
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import property_settings, trees

from specround.kernels.tree_attention.rows import lay_out_rows

TOLERANCE = 1e-5
CONTROL = 100 * TOLERANCE


@pytest.fixture(autouse=True, scope="module")
def _poisoned_outputs() -> Iterator[None]:
    """Every tensor that an op allocates without filling it starts as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """One request of any kind: a chunk of a prompt, a chain, a tree or a mask, with or without unused rows."""
    kind = draw(st.sampled_from(["prefill", "chain", "tree", "mask"]))
    if kind == "prefill":
        return chunk(draw(st.integers(0, 40)), draw(st.integers(1, 40)))
    context, unused = draw(st.integers(0, 40)), draw(st.integers(0, 3))
    if kind == "chain":
        return chunk(context, draw(st.integers(1, 9)), unused)
    columns = draw(st.sampled_from([1, 2, 5, 9, 17, 33, 64]))
    if kind == "tree":
        return tree(context, draw(trees(columns=columns)), unused)
    return masked(context, columns, random.Random(draw(st.integers(0, 2**32))), unused)


SETTINGS = st.builds(
    Setting,
    block_size=st.sampled_from([1, 4, 16, 64]),
    kv_heads=st.integers(1, 2),
    repeats=st.sampled_from([1, 3]),
    key_dim=st.sampled_from([4, 8]),
    value_dim=st.sampled_from([4, 5, 8]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    sinks=st.booleans(),
    softcap=st.one_of(st.none(), st.just(2.0)),
)


@given(st.lists(requests(), min_size=1, max_size=4), SETTINGS, st.integers(0, 2**32))
@property_settings(100)
def test_equals_the_loop_oracle(batch: list[Request], setting: Setting, seed: int) -> None:
    """Any mix of prefill, chains, trees and masks, any layer feature, any block size: equal to listed keys in float64.

    Unused rows are finite too, although every slot that no request owns holds NaN.
    """
    case = build(batch, setting, seed)
    found = run(case)
    assert found.shape == (*case.query.shape[:2], setting.value_dim)
    assert error(found, case) <= TOLERANCE
    assert found.isfinite().all()


def mixed_case(setting: Setting, seed: int = 3) -> Case:
    """A prompt chunk, a deep tree, a chain, a bushy tree and a mask, ragged."""
    deep = [-1] + [max(0, c - 2) for c in range(1, 20)]
    batch = [chunk(5, 11), tree(21, deep), chunk(9, 4, unused=1), tree(6, [-1, 0, 0, 0, 2, 2, 4, 1], unused=5)]
    return build([*batch, masked(13, 12, random.Random(seed))], setting, seed)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_windows_smaller_than_the_tree(block_size: int, window: int | None) -> None:
    """A window measures logical positions inside the tree too, for every block size."""
    case = mixed_case(Setting(block_size=block_size, window=window))
    assert error(run(case), case) <= TOLERANCE


@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 2.0), (True, 2.0)])
def test_sinks_and_softcap(sinks: bool, softcap: float | None) -> None:
    """Sinks take weight without a value and the cap bounds scaled scores; leaving either out is seen (control)."""
    case = mixed_case(Setting(sinks=sinks, softcap=softcap, window=9))
    assert error(run(case), case) <= TOLERANCE
    if sinks:
        assert error(run(replace(case, sinks=None)), case) > CONTROL
    if softcap:
        assert error(run(replace(case, setting=replace(case.setting, softcap=None))), case) > CONTROL


def test_a_causal_mask_instead_of_ancestors_is_seen() -> None:
    """Negative control: plan rows that see every earlier column, as in a chain, exceed 100 x the tolerance."""
    case = mixed_case(Setting())
    causal = [list(range(c + 1)) for request in case.requests for c in range(request.num_rows) if request.offsets]
    assert max(map(len, causal)) == 20
    bits, first = case.context.bits.clone(), 0
    for request in case.requests:
        for c in range(len(request.rows) if request.offsets else 0):
            bits[first + c] = 2 ** (c + 1) - 1
        first += request.num_rows
    assert error(run(case), case) <= TOLERANCE
    assert error(run(case, bits=bits), case) > CONTROL


def test_row_numbers_instead_of_depths_are_seen_under_a_window() -> None:
    """Negative control: measuring a window by row number, on either side, exceeds 100 x the tolerance."""
    parents = [-1, 0, 0, 0, 0, 4, 5, 6]
    case = build([tree(21, parents), tree(6, parents)], Setting(window=3), 5)
    columns = torch.arange(8)
    by_row = torch.cat([21 + columns, 6 + columns])
    assert error(run(case), case) <= TOLERANCE
    assert error(run(case, positions=by_row), case) > CONTROL
    assert error(run(case, key_offsets=columns.expand(2, 8)), case) > CONTROL
    assert error(run(case, positions=by_row, key_offsets=None), case) > CONTROL


def test_columns_sit_at_their_index_without_offsets() -> None:
    """`key_offsets=None` means offset j in column j: a chain laid out by bits equals the chain by context length."""
    chain = [set(range(c + 1)) for c in range(9)]
    case = build([plan_rows(12, chain, list(range(9)))], Setting(window=4), 2)
    found = run(case, key_offsets=None)
    assert error(found, case) <= TOLERANCE
    plain = run(case, bits=None, key_offsets=None, context_len=torch.arange(13, 22))
    assert torch.equal(found, plain)


def test_unused_rows_and_other_requests_do_not_influence_a_row() -> None:
    """NaN in the queries of unused rows changes no bit elsewhere; a request alone equals itself in a batch."""
    setting = Setting(window=9, sinks=True)
    case = mixed_case(setting)
    found = run(case)
    unused = sorted(set(range(len(case.query))) - set(case.used_rows))
    poisoned = replace(case, query=case.query.clone())
    poisoned.query[unused] = float("nan")
    assert torch.equal(run(poisoned)[case.used_rows], found[case.used_rows])
    for r, request in enumerate(case.requests):
        start, stop = case.context.row_start[r : r + 2].tolist()
        alone = replace(
            case,
            requests=[request],
            query=case.query[start:stop],
            context=replace(
                case.context,
                row_start=torch.tensor([0, stop - start]),
                context_len=case.context.context_len[start:stop],
                positions=case.context.positions[start:stop],
                kv_len=case.context.kv_len[r : r + 1],
                base=case.context.base[r : r + 1],
                bits=case.context.bits[start:stop],
                key_offsets=case.context.key_offsets[r : r + 1],
                block_tables=case.context.block_tables[r : r + 1],
            ),
        )
        used = len(request.rows)
        difference = (run(alone)[:used] - found[start : start + used]).abs().max()
        assert difference <= TOLERANCE * found.abs().max()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_rows_that_see_nothing_are_finite(sinks: bool, softcap: float | None) -> None:
    """An unused row far past every key of a window still gets a finite value, in every branch of the op."""
    case = build([chunk(8, 1, unused=3)], Setting(window=2, sinks=sinks, softcap=softcap), 1)
    assert run(case).isfinite().all()
    assert error(run(case), case) <= TOLERANCE


def test_poison_is_seen() -> None:
    """Negative control: NaN in the null block, in a held slot, or rows that nothing wrote, all reach the output."""
    case = mixed_case(Setting())
    for cache in ("key_cache", "value_cache"):
        broken = replace(case, **{cache: getattr(case, cache).clone()})
        getattr(broken, cache)[0] = float("nan")
        assert error(run(broken), case) == float("inf")
    past_the_end = replace(case.context, kv_len=case.context.kv_len + 1, context_len=case.context.context_len + 1)
    assert error(attend(case, lay_out_rows(case.num_rows, 64, past_the_end)), case) == float("inf")
    rows = lay_out_rows(case.num_rows, 64, case.context)
    assert error(attend(case, rows), case) <= TOLERANCE
    vars(rows)["groups"] = rows.groups[1:]
    assert error(attend(case, rows), case) == float("inf")


def test_nothing_past_the_held_keys_is_seen() -> None:
    """Context lengths and bits that point past `kv_len` see no zero key of the null block in its place."""
    case = build([chunk(9, 1), tree(6, [-1]), chunk(17, 1)], Setting(block_size=16), 4)
    beyond = replace(case.context, context_len=case.context.context_len + torch.tensor([5, 0, 30]))
    beyond = replace(beyond, bits=case.context.bits | torch.tensor([0, 2**20 + 2, 0]))
    rows = lay_out_rows(case.num_rows, 64, replace(beyond, key_offsets=None))
    assert error(attend(case, rows), case) <= TOLERANCE


def test_layers_of_one_forward_share_rows_with_different_windows() -> None:
    """Rows are laid out once; layers with other windows or head counts do not see each other's mask."""
    wide, narrow = mixed_case(Setting()), mixed_case(Setting(window=3))
    many = mixed_case(Setting(window=3, kv_heads=1, repeats=3))
    rows = lay_out_rows(wide.num_rows, 64, wide.context)
    for case in (narrow, wide, many, narrow):
        assert error(attend(case, rows), case) <= TOLERANCE


def test_requests_without_rows_take_part_in_nothing() -> None:
    """A batch may hold requests that run no row in this step, alone or between others."""
    case = mixed_case(Setting())
    idle = Request([], 3, [0, 1, 2])
    batch = [idle, idle, *case.requests[:2], idle, *case.requests[2:], idle]
    with_idle = build(batch, Setting(), 3)
    assert error(run(with_idle), with_idle) <= TOLERANCE
    nothing = build([idle], Setting(), 0)
    assert run(nothing).shape == (0, 4, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [{}, {"sinks": True, "softcap": 2.0}])
def test_16_bit_caches(dtype: torch.dtype, features: dict[str, object]) -> None:
    """In 16-bit types the op keeps the query's dtype and stays within a few units in the last place of the oracle."""
    case = mixed_case(Setting(window=5, **features))
    low = replace(
        case, query=case.query.to(dtype), key_cache=case.key_cache.to(dtype), value_cache=case.value_cache.to(dtype)
    )
    found = run(low)
    assert found.dtype == dtype
    assert error(found, low) <= 6 * torch.finfo(dtype).eps


def test_caches_may_be_views_of_one_pool() -> None:
    """Keys and values may be strided views; the op reads them without copying the pool."""
    setting = Setting(key_dim=6, value_dim=6)
    case = mixed_case(setting)
    pool = torch.stack([case.key_cache, case.value_cache], 1)
    viewed = replace(case, key_cache=pool[:, 0], value_cache=pool[:, 1])
    assert not viewed.key_cache.is_contiguous()
    assert torch.equal(run(viewed), run(case))
