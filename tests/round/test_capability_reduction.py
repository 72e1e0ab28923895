"""Reports of several ranks become one, the same on every rank, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specround.contract import PLAN_KINDS, SpecCapabilities
from specround.round import gather_capabilities

RANK = """
import json, sys
from datetime import timedelta
from torch import distributed
from specround.contract import SpecCapabilities
from specround.round.lowering import gather_capabilities

rank, reports, store = int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
reports = [SpecCapabilities(kind, tuple(reasons)) for kind, reasons in reports]
distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=len(reports), timeout=timedelta(seconds=60)
)
pair = distributed.new_group([0, 1])
found = [gather_capabilities(reports[rank]), gather_capabilities(reports[rank], pair) if rank < 2 else None]
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps([report and [report.kind, report.reasons] for report in found]))
"""

REPORTS = [
    ("mask", []),
    ("tree", ["a recurrent state cannot hide a row", "no kernel is registered for attention:mla/verify"]),
    ("chain", ["pipeline parallelism", "a recurrent state cannot hide a row"]),
]


def run_ranks(reports: list[tuple[str, list[str]]], store: Path) -> list[list[list[object] | None]]:
    """What each rank found: over all ranks, and over the first two."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    environment = {**os.environ, **loopback, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), json.dumps(reports), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(len(reports))
    ]
    deadline, answers = time.monotonic() + 90, []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=deadline - time.monotonic())
            assert process.returncode == 0, f"rank {rank}: {err}"
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return answers


def test_every_rank_ends_with_the_same_minimum(tmp_path: Path) -> None:
    """Three ranks that differ: each gets the lowest kind and every reason once, in rank order; so in a group."""
    everyone, pair = [
        SpecCapabilities.reduce([SpecCapabilities(kind, tuple(reasons)) for kind, reasons in REPORTS[:count]])
        for count in (3, 2)
    ]
    assert everyone.kind == "chain"
    assert len(everyone.reasons) == 3
    assert pair.kind == "tree"
    found = run_ranks(REPORTS, tmp_path / "store")
    assert [answer[0] for answer in found] == [[everyone.kind, list(everyone.reasons)]] * 3
    assert [answer[1] for answer in found] == [[pair.kind, list(pair.reasons)]] * 2 + [None]


@pytest.mark.parametrize("kind", PLAN_KINDS)
def test_one_rank_is_the_whole_target(kind: str) -> None:
    """Without a process group the rank's own report holds."""
    report = SpecCapabilities(kind, () if kind == "mask" else ("a reason",))
    assert gather_capabilities(report) == report
