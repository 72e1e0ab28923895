"""Named weights of a checkpoint: what every format offers to the loader, and the safetensors format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from specround.contract.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_JSON_BYTES = 256 * 2**20


class WeightSource(Protocol):
    """Weights that can be listed without reading them, then read one tensor at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by its Hugging Face name."""
        ...

    def location(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, on the CPU, in the checkpoint's floating-point type.

        Raises:
            ModelError: A tensor cannot be read.
        """
        ...


class SafetensorsWeights:
    """The safetensors files of one Hugging Face directory.

    Args:
        directory: Holds `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises:
        ModelError: No safetensors (pickles are refused by name), a missing, truncated or corrupt file, a tensor in two
            shards or in none, or a tensor that is not floating point.
    """

    def __init__(self, directory: Path) -> None:
        listed: dict[str, str] | None = None
        if (directory / SINGLE_FILE).is_file():
            files = [SINGLE_FILE]
        elif (directory / INDEX_FILE).is_file():
            listed = _weight_map(directory / INDEX_FILE)
            files = sorted(set(listed.values()))
        else:
            raise _no_weights(directory)
        self._directory = directory
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, str] = {}
        for file in files:
            self._read_header(file)
        for name, file in (listed or {}).items():
            if self._files.get(name) != file:
                raise ModelError(name, self._files.get(name), f"a tensor of {file}, where {INDEX_FILE} lists it")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return self._shapes

    def location(self, name: str) -> str:
        """See `WeightSource`."""
        return self._files[name]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`."""
        for file in sorted(set(self._files.values())):
            with ExitStack() as stack:
                handle = stack.enter_context(_open(self._directory / file))
                for name in (name for name, holder in self._files.items() if holder == file):
                    yield name, _read(file, name, handle)

    def _read_header(self, file: str) -> None:
        with _open(self._directory / file) as handle:
            for name in handle.keys():  # noqa: SIM118 - a file handle, not a mapping
                if name in self._files:
                    raise ModelError(name, [self._files[name], file], "in one file only")
                part = handle.get_slice(name)
                kind = str(part.get_dtype())
                if kind not in _FLOAT_TYPES:
                    raise ModelError(name, kind, f"one of {sorted(_FLOAT_TYPES)}: quantised checkpoints are not read")
                self._files[name] = file
                self._shapes[name] = tuple(int(size) for size in part.get_shape())


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ModelError: The file is missing, unreadable, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(str(path), path.stat().st_size, f"at most {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError("model", str(path.parent), f"a Hugging Face directory: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(str(path), type(error).__name__, f"valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(str(path), type(value).__name__, "a JSON object")
    return value


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ModelError(str(path), "missing", "present: the checkpoint lists it") from error
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ModelError(str(path), "unreadable", f"a complete safetensors file ({error})") from error


def _read(file: str, name: str, handle: Any) -> torch.Tensor:
    try:
        tensor: torch.Tensor = handle.get_tensor(name)
    except Exception as error:  # SafetensorError, or whatever torch raises for a storage it cannot view
        raise ModelError(name, file, f"a readable tensor ({error})") from error
    return tensor


def _weight_map(path: Path) -> dict[str, str]:
    found = read_json_object(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(str(path), "no weight_map", "an index with a weight_map from tensor to file")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelError(name, file, f"the name of a .safetensors file beside {path.name}")
    return found


def _no_weights(directory: Path) -> ModelError:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return ModelError(
            "model",
            str(directory),
            f"a checkpoint in safetensors: {pickles[0]} is a pickle, which can run code when it is opened; "
            "convert it with the program that made it",
        )
    return ModelError("model", str(directory), f"a directory with {SINGLE_FILE} or {INDEX_FILE}")
