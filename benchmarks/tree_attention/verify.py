"""Time of the tree attention on a GPU beside the time to read the keys and values once.

    python benchmarks/tree_attention/verify.py [--context 8192] [--batches 1 16 64] [--rows 1 16 64] [--no-naive]

Every request is a random tree of `rows` rows behind `context` tokens: 32 query heads on 8 key heads of 128 elements,
bfloat16, blocks of 16 slots in random order. The gate comes first: the Triton op against the naive op in float32 on the
same inputs. Then replays of a graph are timed, each over several caches in turn, so that none stays in the L2 cache.
The floor is the bytes of keys and values over the bandwidth that a matrix-vector product reads with on this card. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from specround.bench.hardware import describe_commit, describe_hardware, describe_versions
from specround.kernels.tree_attention import naive
from specround.kernels.tree_attention.rows import AttentionRows, RowContext, lay_out_rows
from specround.kernels.tree_attention.triton import tree_attention

HEADS, KEY_HEADS, DIM, BLOCK = 32, 8, 128, 16
Inputs = tuple[Tensor, Tensor, Tensor, AttentionRows]


def make_inputs(batch: int, num_rows: int, context: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random queries, caches and trees."""
    device, generator = torch.device("cuda"), torch.Generator(device="cuda").manual_seed(seed)
    length = context + num_rows
    blocks = -(-length // BLOCK)
    order = torch.randperm(batch * blocks, device=device, generator=generator) + 1
    shape = ((batch * blocks + 1) * BLOCK, KEY_HEADS, DIM)
    keys, values = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(2))
    keys[:BLOCK], values[:BLOCK] = 0, 0
    query = torch.randn(batch * num_rows, HEADS, DIM, device=device, dtype=dtype, generator=generator)
    bits, depth = [1], [0]
    for column in range(1, num_rows):
        parent = (column - 1) // 2
        bits.append(bits[parent] | 1 << column)
        depth.append(depth[parent] + 1)
    words = [word - (1 << 64) if word >> 63 else word for word in bits]
    places = torch.tensor(depth, device=device)
    rows = RowContext(
        row_start=torch.arange(batch + 1, device=device, dtype=torch.int32) * num_rows,
        context_len=torch.full((batch * num_rows,), context, device=device),
        positions=(context + places).repeat(batch),
        kv_len=torch.full((batch,), length, device=device),
        base=torch.full((batch,), context, device=device),
        bits=torch.tensor(words, device=device).repeat(batch),
        key_offsets=places.expand(batch, num_rows),
        block_tables=order.view(batch, blocks),
        block_size=BLOCK,
    )
    return query, keys, values, lay_out_rows((num_rows,) * batch, length, rows)


def gate() -> float:
    """Largest difference from the naive op in float32, relative to the largest value."""
    worst = 0.0
    for batch, rows, context in ((1, 1, 300), (3, 16, 1000), (2, 64, 513), (33, 5, 64)):
        query, keys, values, laid_out = make_inputs(batch, rows, context, seed=batch)
        wanted = naive.tree_attention(query.float(), keys.float(), values.float(), laid_out, scale=DIM**-0.5)
        found = tree_attention(query, keys, values, laid_out, scale=DIM**-0.5)
        worst = max(worst, float((found.float() - wanted).abs().max() / wanted.abs().max()))
    return worst


def time_calls(calls: list[Callable[[], Any]], repeats: int = 15, least: int = 12) -> float:
    """Median microseconds of one call, from replays of a graph in which all of them run in turn."""
    rounds = -(-least // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(repeats + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[2:])


def read_bandwidth() -> float:
    """Bytes per second that a matrix-vector product reads."""
    matrix = torch.randn(1 << 17, 1 << 14, device="cuda", dtype=torch.bfloat16)
    vector = torch.randn(1 << 14, device="cuda", dtype=torch.bfloat16)
    return matrix.numel() * 2 / (time_calls([lambda: matrix @ vector], least=4) * 1e-6)


def time_case(batch: int, num_rows: int, context: int, bandwidth: float, *, with_naive: bool) -> dict[str, Any]:
    """Times of one shape."""
    size = batch * (context + num_rows) * KEY_HEADS * DIM * 2 * 2
    inputs = [make_inputs(batch, num_rows, context, seed) for seed in range(max(1, min(6, (400 << 20) // size)))]
    time = time_calls([partial(tree_attention, *one, scale=DIM**-0.5) for one in inputs])
    found = {
        "batch": batch,
        "rows": num_rows,
        "context": context,
        "floor_us": size / bandwidth * 1e6,
        "triton_us": time,
        "share_of_floor": size / bandwidth * 1e6 / time,
        "tflops": 4 * batch * num_rows * HEADS * (context + num_rows) * DIM / time * 1e-6,
    }
    if with_naive:
        for one in inputs:
            one[3].groups  # noqa: B018  (masks are made once a forward, not once a layer)
        found["naive_us"] = time_calls([partial(naive.tree_attention, *one, scale=DIM**-0.5) for one in inputs], 5, 2)
    if num_rows == 1:
        found["sdpa_us"] = time_sdpa(batch, context + 1, len(inputs))
    return found


def time_sdpa(batch: int, length: int, sets: int) -> float:
    """Torch's attention of one row per request over contiguous keys and values, which no paged engine has."""
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = []
    for _ in range(sets):
        query = torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        keys, values = (torch.randn(batch, KEY_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        calls.append(partial(attend, query, keys, values, enable_gqa=True))
    return time_calls(calls)


@torch.no_grad()
def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--no-naive", action="store_true")
    arguments = parser.parse_args()
    error = gate()
    print(f"largest difference from the naive op in float32: {error:.2e}", file=sys.stderr, flush=True)
    if not error <= 2e-2:
        sys.exit("the Triton op is wrong; nothing was timed")
    bandwidth = read_bandwidth()
    print(f"read bandwidth: {bandwidth * 1e-12:.2f} TB/s", file=sys.stderr, flush=True)
    cases = []
    for batch in arguments.batches:
        for rows in arguments.rows:
            case = time_case(batch, rows, arguments.context, bandwidth, with_naive=not arguments.no_naive)
            print({key: round(value, 3) for key, value in case.items()}, file=sys.stderr, flush=True)
            cases.append(case)
            torch.cuda.empty_cache()
    shape = {"heads": HEADS, "key_heads": KEY_HEADS, "dim": DIM, "dtype": "bfloat16", "block_size": BLOCK}
    hardware = {**describe_hardware(torch.device("cuda")), "read_bandwidth": bandwidth}
    versions = {**describe_versions(), "triton": version("triton")}
    found = {
        "benchmark": "tree attention verify",
        "hardware": hardware,
        "versions": versions,
        "commit": describe_commit(),
    }
    print(json.dumps({**found, "shape": shape, "gate_error": error, "cases": cases}))


if __name__ == "__main__":
    main()
