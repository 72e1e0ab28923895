"""Read the header of a GGUF file with every count, length and offset checked against the file before it is used."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from specround.contract.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 2**48
_MIN_ENTRY_BYTES = 13  # key length, key type and one value byte
_MIN_TENSOR_BYTES = 32  # name length, number of dimensions, one dimension, type and offset
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: The file's own name for it.
        shape: Outermost dimension first, as torch counts (the file stores it reversed).
        kind: Number of the storage type (`gguf.GGMLQuantizationType`).
        row_bytes: Bytes of one innermost row.
        start: First byte, from the beginning of the file.
        num_bytes: Length; the whole range lies inside the file and overlaps no other tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    row_bytes: int
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Everything before the tensor data.

    Attributes:
        metadata: Key to int, float, bool, str or a list of one of them.
        tensors: In file order, by name.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a header; memory and time are bounded by the size of the file.

    Raises:
        ModelError: Not a GGUF file, an unsupported version or type, truncated, or any count, length, shape or offset
            that does not fit the file; the message gives the byte position.
    """
    try:
        with path.open("rb") as file:
            return _HeaderReader(path, file, path.stat().st_size).read()
    except OSError as error:
        raise ModelError("model", str(path), f"a readable file ({error})") from error


class _HeaderReader:
    """A forward-only reader that never asks the file for more than is left of it."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size, self._position = path, file, size, 0

    def read(self) -> GgufHeader:
        magic = self._take(4)
        if magic != _MAGIC:
            raise self._corrupt(f"it starts with {magic!r}, not {_MAGIC!r}")
        version = self._integer("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"big-endian version {swapped}" if swapped in _VERSIONS else f"version {version}"
            raise ModelError("GGUF version", what, f"little-endian version {' or '.join(map(str, _VERSIONS))}")
        num_tensors = self._count("<Q", _MIN_TENSOR_BYTES, "tensors")
        num_entries = self._count("<Q", _MIN_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._integer("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        return GgufHeader(metadata=metadata, tensors=self._place(entries, _alignment(metadata)))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._integer("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._integer("<Q") for _ in range(num_dimensions))[::-1]
        elements = 1
        for size in shape:
            elements *= size
        if not 1 <= elements <= _MAX_ELEMENTS:
            raise self._corrupt(f"tensor {name!r} has shape {shape}")
        return name, shape, self._integer("<I"), self._integer("<Q")

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        """Turn the entries into byte ranges and check that each lies in the file, apart from the others."""
        from gguf.constants import GGML_QUANT_SIZES

        sizes = {int(kind): pair for kind, pair in GGML_QUANT_SIZES.items()}
        data_start = -(-self._position // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if kind not in sizes:
                raise ModelError(name, f"storage type {kind}", "a storage type known to the gguf package")
            block, block_bytes = sizes[kind]
            if shape[-1] % block or offset % alignment:
                raise self._corrupt(f"tensor {name!r}: shape {shape} or offset {offset} is misaligned")
            row_bytes = shape[-1] // block * block_bytes
            num_bytes = row_bytes
            for size in shape[:-1]:
                num_bytes *= size
            start = data_start + offset
            if start + num_bytes > self._size:
                raise self._corrupt(f"tensor {name!r} needs bytes {start} to {start + num_bytes}: truncated?")
            if name in placed:
                raise self._corrupt(f"tensor {name!r} occurs twice")
            placed[name] = GgufTensor(
                name=name, shape=shape, kind=kind, row_bytes=row_bytes, start=start, num_bytes=num_bytes
            )
        in_order = sorted(placed.values(), key=lambda tensor: tensor.start)
        for tensor, following in pairwise(in_order):
            if tensor.start + tensor.num_bytes > following.start:
                raise self._corrupt(f"tensors {tensor.name!r} and {following.name!r} overlap")
        return placed

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind = self._integer("<I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count("<Q", 8, "strings"))]
        if kind not in _SCALARS:
            raise self._corrupt(f"an array of type {kind}")
        return self._scalars(kind, self._count("<Q", _SCALARS[kind].itemsize, "values"))

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self._corrupt(f"a value of type {kind}")
        raw = self._take(_SCALARS[kind].itemsize * count)
        values: list[Any] = np.frombuffer(raw, np.uint8 if kind == _BOOL else _SCALARS[kind]).tolist()
        return [bool(value) for value in values] if kind == _BOOL else values

    def _string(self) -> str:
        raw = self._take(self._integer("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a string is not UTF-8 ({error})") from error

    def _count(self, layout: str, least_bytes: int, what: str) -> int:
        count = self._integer(layout)
        if count > (self._size - self._position) // least_bytes:
            raise self._corrupt(f"it claims {count} {what}, more than fit into its {self._size} bytes")
        return count

    def _integer(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _take(self, count: int) -> bytes:
        if count > self._size - self._position:
            raise self._corrupt(f"{count} bytes are needed and {self._size - self._position} are left: truncated?")
        raw = self._file.read(count)
        if len(raw) != count:
            raise self._corrupt("it became shorter while it was read")
        self._position += count
        return raw

    def _corrupt(self, what: str) -> ModelError:
        return ModelError("model", str(self._path), f"a complete GGUF file (near byte {self._position}: {what})")


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise ModelError("general.alignment", alignment, "a power of two from 8 to 2**20")
    return alignment
