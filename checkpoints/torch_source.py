"""Named arrays from a PyTorch file (a zip with `data.pkl` and a member for each storage).

No instruction of the pickle is executed (see `torch_pickle`), and torch is not needed. Storages are stored
uncompressed, so they are mapped in place; a compressed one is refused, whatever it would grow to.

Data flow: path → zip directory → `data.pkl` → descriptions, each checked against its storage's bytes →
`NamedArrays` of lazy arrays.

Worked example: `layers.0.fn.attn_out.weight` float32 [48, 64] in storage 7 needs 12,288 bytes of member
`archive/data/7`; one that claims terabytes is refused, since the member does not hold them.
"""

import dataclasses
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.files import check_inside
from checkpoints.lazy import Box, LazyArray
from checkpoints.named_arrays import NamedArrays
from checkpoints.torch_pickle import RefusedError, StoredTensor, read_pickle
from layers.errors import UserError

_PICKLE = "/data.pkl"
_MAX_PICKLE_BYTES = 1 << 28
_LOCAL_HEADER = 30
_WRAPPERS = ("model", "state_dict", "model_state_dict", "module")
_DTYPES = {
    "DoubleStorage": np.dtype("<f8"), "FloatStorage": np.dtype("<f4"), "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16), "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"), "ShortStorage": np.dtype("<i2"), "CharStorage": np.dtype("<i1"),
    "ByteStorage": np.dtype("<u1"), "BoolStorage": np.dtype("?"),
}  # fmt: skip
_BROKEN = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError)


def read_torch(path: Path) -> NamedArrays:
    """The tensors of a `.pt` file, lazily.

    Raises UserError naming the file, and the tensor where there is one: truncated, a pickle that does
    anything but describe tensors, a storage that is missing, compressed or too short.
    """
    check_inside(path)
    _check_zip(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            twice = len(members) < len(archive.infolist())
            prefix, content = _pickle(path, archive, members)
    except UserError:
        raise
    except _BROKEN as error:
        raise UserError(f"{path}: truncated or damaged ({str(error)[:100]})") from None
    if twice:
        raise UserError(f"{path}: two members have the same name")
    try:
        described = read_pickle(content)
    except RefusedError as error:
        raise UserError(f"{path}: {error}") from None
    tensors = _tensors(path, described)
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    starts = {name: _start(path, data, member) for name, member in members.items() if name.startswith(prefix)}
    arrays = {
        name: _array(path, name, tensor, members.get(prefix + tensor.key), starts, data)
        for name, tensor in tensors.items()
    }
    return NamedArrays(str(path), arrays, {})


def _check_zip(path: Path) -> None:
    """Refuse what PyTorch wrote before it wrote zip files: all of it is one pickle."""
    try:
        with path.open("rb") as stream:
            head = stream.read(4)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if head.startswith(b"\x80"):
        raise UserError(
            f"{path}: a bare pickle, as PyTorch wrote before 1.6, which is not read; save it anew"
        )


def _pickle(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]
) -> tuple[str, bytes]:
    """The storages' name prefix and the pickle."""
    names = [name for name in members if name.endswith(_PICKLE)]
    if len(names) != 1:
        raise UserError(f"{path}: {len(names)} members named data.pkl, expected one")
    root = names[0].removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")
    if order is not None and (order.file_size > 16 or archive.read(order).strip() != b"little"):
        raise UserError(f"{path}: its byte order is not little-endian, which is not supported")
    if members[names[0]].file_size > _MAX_PICKLE_BYTES:
        raise UserError(f"{path}: {names[0]} claims {members[names[0]].file_size:,} bytes")
    return f"{root}data/", archive.read(names[0])


def _tensors(path: Path, described: Any) -> dict[str, StoredTensor]:
    """The state dict: the whole of it, or the one entry that is one."""
    if not isinstance(described, dict):
        raise UserError(f"{path}: it holds a {type(described).__name__}, expected a dict of tensors")
    if not any(isinstance(value, StoredTensor) for value in described.values()):
        inner = next((described[name] for name in _WRAPPERS if isinstance(described.get(name), dict)), None)
        described = described if inner is None else inner
    odd = next((key for key, value in described.items() if not isinstance(value, StoredTensor)), None)
    if odd is not None or not described:
        raise UserError(f"{path}: {str(odd)[:80]!r} is no tensor; expected a dict of tensors")
    name = next((key for key in described if not isinstance(key, str) or not key.isprintable()), None)
    if name is not None:
        raise UserError(f"{path}: a tensor is named {str(name)[:60]!r}, which is not a printable name")
    return described


def _start(path: Path, data: np.ndarray, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: behind its local header, whose two last numbers are lengths."""
    header = data[member.header_offset : member.header_offset + _LOCAL_HEADER].tobytes()
    if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
        raise UserError(f"{path}: {member.filename[:80]} has a damaged header")
    lengths = np.frombuffer(header[-4:], "<u2")
    return member.header_offset + _LOCAL_HEADER + int(lengths.sum())


def _array(
    path: Path,
    name: str,
    tensor: StoredTensor,
    member: zipfile.ZipInfo | None,
    starts: Mapping[str, int],
    data: np.ndarray,
) -> LazyArray:
    """One tensor as a view of its storage, which must hold all of it."""
    if member is None:
        raise UserError(f"{path}: {name} is in storage {tensor.key[:40]}, which is missing")
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise UserError(f"{path}: {name} is in a compressed or encrypted member, which is not supported")
    dtype, start = _DTYPES[tensor.storage], starts[member.filename]
    available = min(member.file_size, len(data) - start) // dtype.itemsize
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    count = math.prod(tensor.shape)
    if count and (tensor.offset + reach > available or count > available):
        raise UserError(
            f"{path}: {name} claims {list(tensor.shape)} of {dtype}, its storage holds {available:,} elements"
        )
    first = start + tensor.offset * dtype.itemsize
    flat = data[first : first + (reach if count else 0) * dtype.itemsize].view(dtype)
    return LazyArray(tensor.shape, dtype, _Read(flat, tensor))


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
    """Read a rectangle of one tensor."""

    flat: np.ndarray
    tensor: StoredTensor

    def __call__(self, box: Box) -> np.ndarray:
        shape = self.tensor.shape
        if not math.prod(shape):
            return np.zeros(shape, self.flat.dtype)[box]
        steps = tuple(step * self.flat.itemsize for step in self.tensor.stride)
        return np.lib.stride_tricks.as_strided(self.flat, shape, steps, writeable=False)[(*box, ...)]
