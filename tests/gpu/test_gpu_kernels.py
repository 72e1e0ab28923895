"""The Triton kernels compiled for a GPU: every test of them, in a graph, and an engine that runs on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "kernels"), str(ROOT / "tests" / "kernels" / "triton_ops")]

from attention_cases import Setting, build, chunk, error, tree  # noqa: E402
from state_device import moved  # noqa: E402
from triton_cases import BUSHY, DEEP, rows_of  # noqa: E402

from specround.kernels.kv_cache.triton import commit_kv, write_kv  # noqa: E402
from specround.kernels.tree_attention import naive  # noqa: E402
from specround.kernels.tree_attention.rows import AttentionRows  # noqa: E402
from specround.kernels.tree_attention.triton import tree_attention  # noqa: E402

TOLERANCE = 1e-5


def test_every_test_of_the_kernels_passes_compiled() -> None:
    """The tests that run in the interpreter elsewhere, on this GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/kernels/triton_ops")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("op", [naive.tree_attention, tree_attention])
def test_attention_is_captured_and_replayed_with_other_rows(op) -> None:
    """One capture serves other contexts, trees and blocks, without a synchronisation while it is made."""
    device = torch.device("cuda")
    setting = Setting(kv_heads=2, repeats=4, key_dim=64, value_dim=64, window=40)
    cases = [build([tree(n, DEEP), tree(n // 2, BUSHY, unused=12)], setting, n) for n in (90, 31, 64)]
    width = max(case.context.block_tables.shape[1] for case in cases)
    slots = max(case.key_cache.shape[0] for case in cases)
    for case in cases:
        tables = torch.zeros(2, width, dtype=torch.int64)
        tables[:, : case.context.block_tables.shape[1]] = case.context.block_tables
        object.__setattr__(case.context, "block_tables", tables)
        for name in ("key_cache", "value_cache"):
            cache = getattr(case, name)
            setattr(case, name, torch.cat([cache, cache.new_zeros(slots - cache.shape[0], *cache.shape[1:])]))
    live = moved(cases[0], device)

    def call() -> torch.Tensor:
        rows = AttentionRows(live.context, tuple(cases[0].num_rows), (200, 200))
        return op(live.query, live.key_cache, live.value_cache, rows, scale=cases[0].scale, window=40)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case in cases:
        there = moved(case, device)
        for name in ("row_start", "context_len", "positions", "kv_len", "base", "bits", "key_offsets", "block_tables"):
            getattr(live.context, name).copy_(getattr(there.context, name))
        for name in ("query", "key_cache", "value_cache"):
            getattr(live, name).copy_(getattr(there, name))
        graph.replay()
        assert error(out.cpu(), case) <= TOLERANCE


def test_writes_and_commits_are_captured() -> None:
    """One capture of a write and a commit serves other slots."""
    device = torch.device("cuda")
    caches = torch.zeros(2, 1, 64, 2, 8, device=device)
    key, value = torch.randn(2, 6, 2, 8, device=device)
    slots, source, target = (torch.zeros(6, dtype=torch.int64, device=device) for _ in range(3))

    def call() -> None:
        write_kv(caches[0, 0], caches[1, 0], key, value, slots)
        commit_kv([caches[0], caches[1]], source, target)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for first in (10, 40):
        slots.copy_(torch.arange(first, first + 6))
        source.copy_(torch.tensor([0, first + 2, first + 4, 0, 0, 0]))
        target.copy_(torch.tensor([0, first + 1, first + 2, 0, 0, 0]))
        graph.replay()
        assert torch.equal(caches[0, 0, first : first + 6], key[[0, 2, 4, 3, 4, 5]])
        assert torch.equal(caches[1, 0, first : first + 6], value[[0, 2, 4, 3, 4, 5]])
    assert not caches[:, :, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)])
def test_head_sizes(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Head sizes of real models compile with the chosen launch and are right, in prompts, trees and decode rows."""
    setting = Setting(kv_heads=1, repeats=4, key_dim=dims[0], value_dim=dims[1], block_size=16)
    case = build([chunk(100, 70), tree(300, DEEP), chunk(513, 1)], setting, 1)
    for name in ("query", "key_cache", "value_cache"):
        setattr(case, name, getattr(case, name).to(dtype))
    there = moved(case, torch.device("cuda"))
    rows = rows_of(case)
    rows = AttentionRows(there.context, rows.counts, rows.bounds)
    found = tree_attention(there.query, there.key_cache, there.value_cache, rows, scale=case.scale)
    limit = TOLERANCE if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
    assert error(found.cpu(), case) <= limit
