"""The header of a GGUF file: metadata and where each tensor is, every length checked before it is used.

    "GGUF", version, tensors, pairs;  pairs of key and typed value;  name, dims, kind and offset each;  data

The package `gguf` knows the quantized kinds, but its reader trusts counts (an array that claims 2^60 elements
is walked to its end) and takes ten seconds for a vocabulary of 49,152; so the header is walked here. What the
file claims is compared with the bytes that are left, and costs nothing until it fits.

Worked example: `llama.block_count` as uint32 30 is 8 bytes of length, 17 of key, type 4 (4 bytes), then 30.
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layers.errors import UserError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, np.dtype] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes:
      shape: outermost dim first; the file has them the other way round.
      kind: the number of its encoding.
      offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata by key (scalars, texts, and lists of them), and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """The header of the file at a path.

    Raises UserError naming the file, and the key or tensor where there is one: not GGUF, another version,
    truncated, a claim that the file is too short for, a key or tensor twice.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).header()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # an empty file cannot be mapped
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: empty or damaged ({error})") from None


def without_tensors(path: Path) -> bytes:
    """The same file with its metadata and no tensors: a tokenizer that travels without its weights.

    Raises UserError as `read_header`.
    """
    read_header(path)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(path, data)
        walk.header()
        return data[:8] + bytes(8) + data[16 : walk.metadata_end]


class _Walk:
    """Reads values one after another, never beyond the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.what = path, data, 0, "the header"
        self.metadata_end = 0

    def header(self) -> GgufHeader:
        """Everything before the data."""
        if self.take(4) != MAGIC:
            raise UserError(f"{self.path}: not a GGUF file")
        version = self.number("<u4")
        if version not in _VERSIONS:
            raise UserError(
                f"{self.path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)"
            )
        tensors, pairs = self.count("<u8", 24), self.count("<u8", 12)
        metadata: dict[str, Any] = {}
        for index in range(pairs):
            self.what = f"metadata {index}"
            key = self.text()
            if not key.isprintable() or key in metadata:
                raise UserError(f"{self.path}: the key {key[:80]!r} is there twice or not printable")
            self.what = key[:80]
            metadata[key] = self.value()
        self.metadata_end = self.at
        infos = self._infos(tensors)
        start = self._data_start(metadata)
        moved = {name: dataclasses.replace(info, offset=info.offset + start) for name, info in infos.items()}
        return GgufHeader(metadata, moved)

    def _infos(self, tensors: int) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for index in range(tensors):
            self.what = f"tensor {index}"
            name = self.text()
            if not name.isprintable() or name in infos:
                raise UserError(f"{self.path}: the tensor {name[:80]!r} is there twice or not printable")
            self.what = name[:80]
            dims = self.number("<u4")
            if not 1 <= dims <= _MAX_DIMS:
                raise UserError(f"{self.path}: {self.what} has {dims} dims; allowed: 1 to {_MAX_DIMS}")
            shape = tuple(self.number("<u8") for _ in range(dims))[::-1]
            if min(shape) < 1 or math.prod(shape) > 1 << 62:
                raise UserError(f"{self.path}: {self.what} claims the shape {list(shape)}")
            infos[name] = TensorInfo(shape, self.number("<u4"), self.number("<u8"))
        return infos

    def _data_start(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        return -(-self.at // alignment) * alignment

    def value(self) -> Any:
        """A typed value."""
        kind = self.number("<u4")
        return self._list() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: {self.what} has a value of unknown type {kind}")
        return self._numbers(kind, 1)[0]

    def _list(self) -> list[Any]:
        kind = self.number("<u4")
        if kind == _STRING:
            return [self.text() for _ in range(self.count("<u8", 8))]
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: {self.what} has a list of unknown type {kind}")
        return self._numbers(kind, self.count("<u8", _SCALARS[kind].itemsize))

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _SCALARS[kind]
        raw = self.take(count * dtype.itemsize)
        if kind == _BOOL:
            return [byte != 0 for byte in raw]
        return np.frombuffer(raw, dtype).tolist()

    def text(self) -> str:
        """A text with its length before it."""
        raw = self.take(self.count("<u8", 1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: {self.what} has a text that is not UTF-8") from None

    def number(self, dtype: str) -> int:
        """An unsigned integer."""
        size = np.dtype(dtype).itemsize
        return int(struct.unpack("<I" if size == 4 else "<Q", self.take(size))[0])

    def count(self, dtype: str, smallest: int) -> int:
        """How many items of at least `smallest` bytes follow. Raises UserError if they cannot."""
        claimed = self.number(dtype)
        if claimed * smallest > len(self.data) - self.at:
            raise UserError(
                f"{self.path}: truncated or damaged: {self.what} claims {claimed:,} items, "
                f"but {len(self.data) - self.at:,} bytes are left"
            )
        return claimed

    def take(self, size: int) -> bytes:
        """The next bytes. Raises UserError at the file's end."""
        if size > len(self.data) - self.at:
            raise UserError(f"{self.path}: truncated in {self.what}")
        self.at += size
        return self.data[self.at - size : self.at]
