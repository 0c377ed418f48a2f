"""Named arrays from a NumPy `.npz` file: tensors as `w::NAME`, their config as JSON text in `meta`.

Only headers are read at first: the zip directory says what members there are, and each member's NumPy
header says its shape and dtype, which must account for the member's bytes exactly. So a header that
claims terabytes costs nothing, and no pickle is ever loaded. Other members (`ids`, `logits`) belong to
whoever stored them and are not tensors. A file with members arr_0, arr_1, … alone is a list of leaves
(`numpy.savez` of a flattened tree); their names here are their numbers.

Data flow: path → zip directory → headers → `NamedArrays` of lazy arrays; a member is read, and its
checksum verified, when a rectangle of it is asked for.

Worked example: `w::4.gamma` with header float32 [48] has 128 header bytes and 192 data bytes.
"""

import dataclasses
import json
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.lazy import LazyArray
from checkpoints.named_arrays import NamedArrays
from layers.errors import UserError

PREFIX = "w::"
CONFIG = "meta"
_LEAF = "arr_"
_MAX_CONFIG_BYTES = 1 << 22
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, OSError,
           tokenize.TokenError)  # fmt: skip


def read_npz(path: Path) -> NamedArrays:
    """The tensors of an `.npz` file, lazily.

    Raises UserError naming the file, and the member where there is one: not a zip file, truncated,
    without tensors, a member that is no plain array, or a config that is no JSON object.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except _BROKEN as error:
        raise UserError(f"{path}: truncated or not an .npz file ({_first_line(error)})") from None
    names = [member.filename for member in members]
    odd = next((name for name in names if not name.isprintable()), None)
    if odd is not None:
        raise UserError(f"{path}: a member is named {odd[:60]!r}, which is not printable")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: two members are named {twice}")
    leaves = all(name.startswith(_LEAF) for name in names)
    prefix = _LEAF if leaves else PREFIX
    arrays = {
        member.filename.removeprefix(prefix).removesuffix(".npy"): _lazy_member(path, member)
        for member in members
        if member.filename.startswith(prefix)
    }
    if not arrays:
        raise UserError(f"{path}: no tensors; expected members named {PREFIX}NAME and a member {CONFIG}")
    return NamedArrays(str(path), arrays, _config(path, members))


@dataclasses.dataclass(frozen=True)
class _Header:
    """What a member's NumPy header says, and how long it is."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    size: int


def _lazy_member(path: Path, member: zipfile.ZipInfo) -> LazyArray:
    """One member as an array that is read when asked for."""
    header = _header(path, member)
    return LazyArray(header.shape, header.dtype, lambda box: _read_member(path, member)[box])


def _header(path: Path, member: zipfile.ZipInfo) -> _Header:
    """A member's header, which must account for all of its bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = _parse_header(archive, member)
    except _BROKEN as error:
        raise UserError(f"{path}: {member.filename} is not a NumPy array ({_first_line(error)})") from None
    if header.dtype.hasobject or header.dtype.kind == "V":
        raise UserError(f"{path}: {member.filename} has dtype {header.dtype}, expected numbers")
    data = member.file_size - header.size
    if min(header.shape, default=0) < 0 or math.prod(header.shape) * header.dtype.itemsize != data:
        raise UserError(
            f"{path}: {member.filename} claims {list(header.shape)} of {header.dtype}, "
            f"but holds {data} bytes of data"
        )
    return header


def _parse_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Header:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"format version {version}")
        return _Header(*_HEADERS[version](stream), stream.tell())


def _read_member(path: Path, member: zipfile.ZipInfo) -> np.ndarray:
    """All of one member; the zip reader verifies its checksum at the end."""
    try:
        with zipfile.ZipFile(path) as archive:
            header = _parse_header(archive, member)
            data = archive.read(member)
        flat = np.frombuffer(data, header.dtype, offset=header.size)
        return flat.reshape(header.shape, order="F" if header.fortran else "C")
    except _BROKEN as error:
        raise UserError(f"{path}: {member.filename} is damaged ({_first_line(error)})") from None


def _config(path: Path, members: list[zipfile.ZipInfo]) -> Mapping[str, Any]:
    """The JSON object in `meta`, or an empty one."""
    member = next((member for member in members if member.filename == f"{CONFIG}.npy"), None)
    if member is None:
        return {}
    if member.file_size > _MAX_CONFIG_BYTES:
        raise UserError(
            f"{path}: {CONFIG} has {member.file_size} bytes, expected at most {_MAX_CONFIG_BYTES}"
        )
    header = _header(path, member)
    if header.shape != () or header.dtype.kind != "U":
        raise UserError(f"{path}: {CONFIG} is {header.dtype} {list(header.shape)}, expected one JSON text")
    try:
        config = json.loads(str(_read_member(path, member)[()]))
    except ValueError as error:
        raise UserError(f"{path}: {CONFIG} is not JSON ({_first_line(error)})") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: {CONFIG} is a JSON {type(config).__name__}, expected an object")
    return config


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:120] if text else type(error).__name__
