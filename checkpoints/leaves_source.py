"""Named arrays from a list of leaves: arrays one after another, with nothing that says what they are.

A tree of arrays is flattened into its leaves, which are written in order, either as NumPy arrays one behind
the other in one file (`equinox.tree_serialise_leaves`) or as the members arr_0, arr_1, … of an `.npz` file
(`numpy.savez`; see `npz_source`). The leaves' names here are their numbers, so a reader tells a model by
their shapes alone. No pickle is ever loaded: an array of objects is refused.

Data flow: path → header after header, each checked against what is left of the file → `NamedArrays` of views
of the mapped file.

Worked example: a header "float32 [256, 48]" of 128 bytes is followed by 49,152 bytes of data; the next header
begins at byte 49,280.
"""

import math
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from checkpoints.files import check_inside
from checkpoints.lazy import LazyArray
from checkpoints.named_arrays import NamedArrays
from layers.errors import UserError

MAGIC = b"\x93NUMPY"
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_BFLOAT16 = np.dtype("V2")  # NumPy's format has no name for it
_MAX_LEAVES = 1 << 16


def read_leaves(path: Path) -> NamedArrays:
    """The leaves of a file of arrays, named "0", "1", …, lazily.

    Raises UserError naming the file, and the leaf's number: truncated, damaged, or no array of numbers.
    """
    check_inside(path)
    size = path.stat().st_size
    arrays: dict[str, LazyArray] = {}
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    with path.open("rb") as stream:
        while stream.tell() < size:
            if len(arrays) == _MAX_LEAVES:
                raise UserError(f"{path}: more than {_MAX_LEAVES:,} leaves")
            arrays[str(len(arrays))] = _leaf(path, len(arrays), stream, mapped)
    return NamedArrays(str(path), arrays, {})


def _leaf(path: Path, number: int, stream: BinaryIO, mapped: np.ndarray) -> LazyArray:
    """The array whose header begins here; the stream is left behind its data."""
    try:
        read_header = _HEADERS[np.lib.format.read_magic(stream)]
        shape, fortran, dtype = read_header(stream)
    except Exception as error:  # NumPy evaluates the header's text, and raises what that raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path}: leaf {number} is truncated or no NumPy array ({reason})") from None
    if dtype == _BFLOAT16:
        dtype = np.dtype(ml_dtypes.bfloat16)
    elif dtype.hasobject or dtype.kind not in "fiub":
        raise UserError(f"{path}: leaf {number} has dtype {str(dtype)[:60]}, expected numbers")
    start, count = stream.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start + count > len(mapped):
        raise UserError(
            f"{path}: leaf {number} claims {str(list(shape))[:80]} of {dtype}, "
            f"but {len(mapped) - start:,} bytes are left"
        )
    stream.seek(start + count)
    flat = mapped[start : start + count].view(dtype)
    return LazyArray(shape, dtype, flat.reshape(shape, order="F" if fortran else "C").__getitem__)
