"""How OpenMP's threads wait for work: asleep on a busy computer, spinning on an idle one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_SAMPLE_S = 0.1
_STAT = Path("/proc/stat")


def choose_wait_policy(read_stat: Callable[[], str] = _STAT.read_text, sample_s: float = _SAMPLE_S) -> None:
    """Set `OMP_WAIT_POLICY=PASSIVE` if other programs are using the processor; leave it alone if it is set.

    A decode step is thousands of short operations. Threads that spin between them are twice as fast as threads that
    are woken for each, as long as every thread has a core; when another program takes one, spinning threads wait for a
    thread that does not run, and are several times slower. Call it before torch starts its threads.

    Args:
        read_stat: Gives the text of `/proc/stat`.
        sample_s: How long to look, in seconds.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    try:
        before = _busy_and_total(read_stat())
        time.sleep(sample_s)
        after = _busy_and_total(read_stat())
    except (OSError, ValueError):  # no Linux: each system's own default
        return
    busy, total = after[0] - before[0], after[1] - before[1]
    cores = os.cpu_count() or 1
    if total > 0 and busy / total * cores > 0.5:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _busy_and_total(stat: str) -> tuple[int, int]:
    """Ticks in which a core worked, and all ticks, of the line of all cores: user, nice, system, idle, iowait, ..."""
    name, *ticks = stat.split("\n", 1)[0].split()
    numbers = [int(tick) for tick in ticks[:8]]
    if name != "cpu" or len(numbers) < 5:
        raise ValueError(f"not the first line of /proc/stat: {stat[:40]!r}")
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)
