"""Where a benchmark ran: the machine, versions, and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from specround.version import __version__

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_PACKAGES = ("torch", "transformers", "numpy", "tokenizers")
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """The processor, how much of it this process may use, and the device the model runs on."""
    model, flags = _processor()
    found: dict[str, Any] = {
        "cpu": model,
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def describe_versions() -> dict[str, str | None]:
    """Python, specround, and the packages that matter for speed."""
    return {"python": platform.python_version(), "specround": __version__} | {
        name: _version(name) for name in _PACKAGES
    }


def describe_commit() -> dict[str, Any] | None:
    """The commit of the checkout this package runs from and whether it was changed since; None outside of one."""
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "version.py") is None:
        return None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    return None if commit is None else {"id": commit, "dirty": bool(changes)}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> tuple[str, frozenset[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", platform.machine()), frozenset(flags.split())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
