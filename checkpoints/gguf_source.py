"""Named arrays from a GGUF file; quantized tensors are dequantized where they are looked at.

Data are mapped. A quantized row is a row of blocks, so a rectangle is cut out of whole blocks of its rows:
what is read and dequantized at a time is one rectangle.

Data flow: path → `gguf_header` → `NamedArrays` (metadata as config); what is quantized reads as float32.

Worked example: Q4_1 packs 32 weights in 20 bytes. `blk.0.ffn_up.weight` [1536, 576] is 1536 rows of 18
blocks, 360 bytes each; columns 100 to 300 of a row are in blocks 3 to 9.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.files import check_inside
from checkpoints.gguf_header import TensorInfo, read_header
from checkpoints.lazy import Box, LazyArray
from checkpoints.named_arrays import NamedArrays
from layers.errors import UserError

_ROW_BLOCKS = 512
_PLAIN = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One encoding: its name, weights and bytes of a block, and how blocks become float32."""

    name: str
    block: int
    size: int
    dequantize: Callable[[np.ndarray], np.ndarray] | None


def read_gguf(path: Path) -> NamedArrays:
    """Metadata and tensors of a GGUF file, lazily.

    Raises UserError naming the file, and the key or tensor where there is one: see `read_header`; an encoding
    that is not supported, data beyond the file's end.
    """
    check_inside(path)
    header = read_header(path)
    kinds = _kinds(path)
    size = path.stat().st_size
    data = np.memmap(path, np.uint8, "r")
    arrays = {name: _array(path, name, info, kinds, data, size) for name, info in header.tensors.items()}
    return NamedArrays(str(path), arrays, header.metadata)


def _array(
    path: Path, name: str, info: TensorInfo, kinds: dict[int, _Kind], data: np.ndarray, size: int
) -> LazyArray:
    """One tensor, which is read when asked for."""
    kind = kinds.get(info.kind)
    if kind is None:
        supported = ", ".join(sorted(known.name for known in kinds.values()))
        raise UserError(
            f"{path}: {name} has encoding {info.kind}, which is not supported; supported: {supported}"
        )
    rows, columns = math.prod(info.shape[:-1]), info.shape[-1]
    if columns % kind.block:
        raise UserError(
            f"{path}: {name} has rows of {columns}, which are not blocks of {kind.block} ({kind.name})"
        )
    row_bytes = columns // kind.block * kind.size
    if info.offset + rows * row_bytes > size:
        raise UserError(
            f"{path}: truncated: {name} ends at byte {info.offset + rows * row_bytes:,} of {size:,}"
        )
    stored = data[info.offset : info.offset + rows * row_bytes].reshape(*info.shape[:-1], row_bytes)
    dtype = _PLAIN.get(kind.name, np.dtype(np.float32))
    return LazyArray(info.shape, dtype, _Read(path, name, stored, kind))


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
    """Read a rectangle of one tensor."""

    path: Path
    name: str
    stored: np.ndarray
    kind: _Kind

    def __call__(self, box: Box) -> np.ndarray:
        kind, columns = self.kind, box[-1]
        first = columns.start // kind.block
        last = max(first, -(-columns.stop // kind.block))
        blocks = np.ascontiguousarray(self.stored[(*box[:-1], slice(first * kind.size, last * kind.size))])
        if kind.dequantize is None:
            return blocks.view(_PLAIN[kind.name])
        wide = (*blocks.shape[:-1], (last - first) * kind.block)
        values = kind.dequantize(blocks) if blocks.size else np.zeros(wide, np.float32)
        start = columns.start - first * kind.block
        return values.reshape(wide)[..., start : start + columns.stop - columns.start]


def _kinds(path: Path) -> dict[int, _Kind]:
    """Every encoding that can be read, by its number."""
    try:
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise UserError(
            f"{path}: reading it needs the package gguf; pip install 'palm-inference[hf]'"
        ) from None
    kinds: dict[int, _Kind] = {}
    for kind in GGMLQuantizationType:
        block, size = GGML_QUANT_SIZES[kind]
        if kind.name in _PLAIN:
            kinds[kind.value] = _Kind(kind.name, 1, _PLAIN[kind.name].itemsize, None)
        elif _can_dequantize(quants, kind, size):
            kinds[kind.value] = _Kind(kind.name, block, size, _Dequantize(quants.dequantize, kind, size))
    return kinds


def _can_dequantize(quants: Any, kind: Any, size: int) -> bool:
    """Whether the package knows this encoding; integers and the encodings of activations it does not."""
    try:
        quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (NotImplementedError, KeyError, ValueError, TypeError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class _Dequantize:
    """The package's function for one encoding, in long rows.

    The package loops over sixteen rows at a time, which for rows of a small model is mostly the loop.
    """

    function: Callable[[np.ndarray, Any], np.ndarray]
    kind: Any
    size: int

    def __call__(self, blocks: np.ndarray) -> np.ndarray:
        flat, row = blocks.reshape(-1), _ROW_BLOCKS * self.size
        whole = len(flat) // row * row
        parts = [flat[:whole].reshape(-1, row)] if whole else []
        parts += [flat[whole:].reshape(1, -1)] if whole < len(flat) else []
        values = [self.function(part, self.kind).reshape(-1) for part in parts]
        return (values[0] if len(values) == 1 else np.concatenate(values)).astype(np.float32, copy=False)
