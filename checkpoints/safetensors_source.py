"""Named arrays from safetensors files: one file, or shards that an index names.

The header says names, dtypes, shapes and places; the package `safetensors` checks it against the file's size,
so a header that claims terabytes costs nothing. Data are mapped: a rectangle is a view of the file, and only
what a device is given of it is copied.

Data flow: path → header of each shard → `NamedArrays` of lazy arrays; an array's dtype is its stored one.

Worked example: the index {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}} says where
a tensor is; a shard must hold exactly the tensors that the index places in it.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from checkpoints.files import check_inside, read_json_object
from checkpoints.lazy import ArrayLike, LazyArray
from layers.errors import UserError

if TYPE_CHECKING:
    from safetensors import safe_open

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8


def read_safetensors(path: Path) -> dict[str, LazyArray]:
    """The tensors of one file.

    Raises UserError naming the file, and the tensor where there is one: truncated, damaged, two tensors of
    one name, or a dtype that is not supported.
    """
    check_inside(path)
    shard = _Shard(path, _header(path))
    return {name: shard.array(name) for name in shard.names()}


def read_sharded(
    index: Path, read_file: Callable[[Path], Mapping[str, ArrayLike]] = read_safetensors
) -> dict[str, ArrayLike]:
    """The tensors of all shards that an index names, each as `read_file` gives it.

    Raises UserError naming the file: the index is damaged, names a file outside its folder or one that is
    missing, or a shard holds other tensors than the index says.
    """
    placed = _weight_map(index)
    arrays: dict[str, ArrayLike] = {}
    for shard in dict.fromkeys(placed.values()):
        path = index.parent / shard
        if not path.is_file():
            name = next(name for name, where in placed.items() if where == shard)
            raise UserError(f"{index}: {name} is in {shard}, which is missing")
        here = read_file(path)
        missing = [name for name, where in placed.items() if where == shard and name not in here]
        if missing:
            raise UserError(f"{path}: no {missing[0]}, although {index.name} says that it is there")
        extra = [name for name in here if placed.get(name) != shard]
        if extra:
            raise UserError(f"{path}: {extra[0][:80]} is not placed here by {index.name}")
        arrays |= here
    return {name: arrays[name] for name in placed}


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file name, both checked."""
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise UserError(f"{index}: weight_map is {str(placed)[:60]}, expected an object of file names")
    for name, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise UserError(
                f"{index}: {name[:80]} is in {shard!r:.80}, expected the name of a file in the folder"
            )
    return placed


@dataclasses.dataclass(frozen=True)
class _Header:
    """Where data begin in a file, and what its header says of each tensor; the package checks the latter."""

    start: int
    tensors: Mapping[str, Any]


def _header(path: Path) -> _Header:
    """The header; refuses names that are not printable or there twice: the package would keep one of two."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, path.stat().st_size):
                raise UserError(
                    f"{path}: truncated or no safetensors file: its header claims {length:,} bytes, "
                    f"the file has {path.stat().st_size:,}"
                )
            header = stream.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        pairs = json.loads(header, object_pairs_hook=list)
        names = [name for name, _ in pairs]
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: truncated or no safetensors file (its header is no JSON: {_line(error)})"
        ) from None
    odd = next((name for name in names if not name.isprintable()), None)
    if odd is not None:
        raise UserError(f"{path}: a tensor is named {odd[:60]!r}, which is not printable")
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise UserError(f"{path}: two tensors are named {twice[:80]}")
    tensors = {name: dict(said) for name, said in pairs if isinstance(said, list)}
    return _Header(_LENGTH_BYTES + length, tensors)


@dataclasses.dataclass(frozen=True, eq=False)
class _Shard:
    """One open file."""

    path: Path
    header: _Header

    @functools.cached_property
    def file(self) -> "safe_open":
        """The mapped file, its header checked."""
        try:
            import safetensors
        except ImportError:
            raise UserError(
                f"{self.path}: reading it needs the package safetensors; pip install 'palm-inference[hf]'"
            ) from None
        try:
            return safetensors.safe_open(self.path, framework="np")
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{self.path}: truncated or damaged ({_line(error)})") from None

    def names(self) -> list[str]:
        """The tensors' names, in the file's order."""
        return list(self.file.offset_keys())

    def array(self, name: str) -> LazyArray:
        """One tensor, which is read when asked for."""
        checked = self.file.get_slice(name)
        dtype, shape = _DTYPES.get(checked.get_dtype()), tuple(checked.get_shape())
        if dtype is None:
            raise UserError(
                f"{self.path}: {name[:80]} has dtype {checked.get_dtype()}, which is not supported; "
                f"supported: {', '.join(_DTYPES)}"
            )
        first, last = (self.header.start + int(at) for at in self.header.tensors[name]["data_offsets"])
        stored = self.bytes[first:last].view(dtype).reshape(shape)
        return LazyArray(shape, dtype, stored.__getitem__)

    @functools.cached_property
    def bytes(self) -> np.ndarray:
        """The mapped file; a plain array, whose slices cost less than a memmap's."""
        return np.asarray(np.memmap(self.path, np.uint8, "r"))


def _line(error: BaseException) -> str:
    lines: list[str] = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
