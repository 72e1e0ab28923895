"""How much memory a device has left, and errors that name the setting when something does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specround.contract import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, None where the system does not say.

    On a CPU this is what Linux calls available, within the limit of the process's container; elsewhere all of the
    machine's memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_available(), _container_limit()) if size is not None]
    return min(known, default=None)


@contextmanager
def allocation(field: str, value: object, size: int, what: str, device: torch.device) -> Iterator[None]:
    """Refuse, by the name of the setting, to allocate what does not fit.

    Checked before anything is allocated: a system that overcommits would hand out the memory and kill the process when
    it is used.

    Args:
        field: The setting that decides the size.
        value: Its value.
        size: Bytes that the body allocates.
        what: What they are for.
        device: Where.

    Raises:
        ConfigError: More than is free, or the allocator refuses.
    """
    free = free_memory(device)
    if free is not None and size > free:
        raise ConfigError(field, value, f"smaller: {what} would take {size} bytes, and {device} has {free} bytes free")
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(field, value, f"smaller: {what} would take {size} bytes on {device} ({reason})") from error


def _available() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system without sysconf, or without these names
        return None


def _container_limit() -> int | None:
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() else None
