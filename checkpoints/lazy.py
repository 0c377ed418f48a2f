"""Arrays that are read only where they are looked at.

A checkpoint is larger than a chip and often larger than the host. So a reader never loads: it
returns `LazyArray`s, each with a shape, a dtype and a way to fetch one rectangle, and the loader asks
for the rectangle of each shard. Views over such arrays (rows of a fused matrix, a transpose, one dim
split in two) translate the rectangle that is asked for into the rectangle to read.

Data flow: file → base array (memory map, tensorstore, ...) → views → `array[slices]` → NumPy.

Worked example: `proj` holds q, k and v of 4 heads of 16 as rows, [96, 48]. q in this project's form
is [48, 4, 16], embed first: `transposed(split_dim(sliced(proj, 0, 0, 64), 0, (4, 16)), (2, 0, 1))`.
Reading `[:, 1:2, :]` of it reads rows 16 to 31 of the file, a sixth of the matrix.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

Box = tuple[slice, ...]  # one unit-step slice with start and stop for every dim


@runtime_checkable
class ArrayLike(Protocol):
    """What weights are made of: a NumPy array, or anything that can be sliced like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""

    @property
    def dtype(self) -> np.dtype:
        """Element type."""

    def __getitem__(self, index: Any) -> Any:
        """The elements of a rectangle, read now."""


@dataclasses.dataclass(frozen=True, eq=False)
class LazyArray:
    """An array whose elements come from `fetch(box)`, where box has one slice for every dim.

    Slices have unit step. `numpy.asarray` reads all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[Box], np.ndarray]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a rectangle; integers drop their dim.

        Raises IndexError for other kinds of index, and for a fetch of another shape than asked for.
        """
        box, dropped = _as_box(index, self.shape)
        want = tuple(part.stop - part.start for part in box)
        out = np.asarray(self.fetch(box))
        if out.shape != want:
            raise IndexError(f"expected {want} elements from the source, found {out.shape}")
        kept = tuple(0 if axis in dropped else slice(None) for axis in range(out.ndim))
        return np.asarray(out[kept], out.dtype)  # also where no dim is left

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All elements, read now; of a mapped file they may be a read-only view."""
        if copy is False:
            raise ValueError("a lazy array has no memory to share")
        out = self[...]
        return np.array(out, dtype) if copy else out if dtype is None else out.astype(dtype)


def _as_box(index: Any, shape: tuple[int, ...]) -> tuple[Box, frozenset[int]]:
    """Turn a NumPy-style index into a full box and the dims that integers drop."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        filler = (slice(None),) * (len(shape) - len(parts) + 1)
        parts = parts[:at] + filler + parts[at + 1 :]
    if len(parts) > len(shape):
        raise IndexError(f"{len(parts)} indices for shape {shape}")
    parts = parts + (slice(None),) * (len(shape) - len(parts))
    box, dropped = [], []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, (int, np.integer)):
            if not -size <= part < size:
                raise IndexError(f"index {part} is outside dim {axis} of size {size}")
            dropped.append(axis)
            part = slice(part % size, part % size + 1)
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise IndexError(f"a lazy array takes integers and unit-step slices, got {part!r}")
        start, stop, _ = part.indices(size)
        box.append(slice(start, max(start, stop)))
    return tuple(box), frozenset(dropped)


@dataclasses.dataclass(frozen=True, eq=False)
class _Slice:
    """Read rows start… of one dim."""

    array: ArrayLike
    axis: int
    start: int

    def __call__(self, box: Box) -> np.ndarray:
        part = slice(box[self.axis].start + self.start, box[self.axis].stop + self.start)
        return np.asarray(self.array[box[: self.axis] + (part,) + box[self.axis + 1 :]])


def sliced(array: ArrayLike, axis: int, start: int, stop: int) -> LazyArray:
    """The elements start to stop (exclusive) of one dim, as a view."""
    size = array.shape[axis]
    if not 0 <= start <= stop <= size:
        raise IndexError(f"{start}:{stop} is outside dim {axis} of size {size}")
    shape = tuple(array.shape[:axis]) + (stop - start,) + tuple(array.shape[axis + 1 :])
    return LazyArray(shape, array.dtype, _Slice(array, axis, start))


@dataclasses.dataclass(frozen=True, eq=False)
class _Transpose:
    """Read with the dims in another order."""

    array: ArrayLike
    order: tuple[int, ...]

    def __call__(self, box: Box) -> np.ndarray:
        base: list[slice] = [slice(None)] * len(self.order)
        for part, axis in zip(box, self.order, strict=True):
            base[axis] = part
        return np.asarray(self.array[tuple(base)]).transpose(self.order)


def transposed(array: ArrayLike, order: tuple[int, ...]) -> LazyArray:
    """The dims in another order, as `numpy.transpose`, as a view."""
    if sorted(order) != list(range(len(array.shape))):
        raise IndexError(f"{order} is not an order of the dims of {array.shape}")
    shape = tuple(array.shape[axis] for axis in order)
    return LazyArray(shape, array.dtype, _Transpose(array, order))


@dataclasses.dataclass(frozen=True, eq=False)
class _Split:
    """Read one dim as several; whole in the inner ones, then cut."""

    array: ArrayLike
    axis: int
    sizes: tuple[int, ...]

    def __call__(self, box: Box) -> np.ndarray:
        axis, end = self.axis, self.axis + len(self.sizes)
        inner = math.prod(self.sizes[1:])
        rows = slice(box[axis].start * inner, box[axis].stop * inner)
        read = np.asarray(self.array[box[:axis] + (rows,) + box[end:]])
        split = (box[axis].stop - box[axis].start,) + self.sizes[1:]
        read = read.reshape(read.shape[:axis] + split + read.shape[axis + 1 :])
        return read[(slice(None),) * (axis + 1) + box[axis + 1 : end]]


def split_dim(array: ArrayLike, axis: int, sizes: tuple[int, ...]) -> LazyArray:
    """One dim seen as several, first one outermost, as a view.

    A rectangle that is partial in an inner dim is read whole there and cut afterwards.
    """
    if math.prod(sizes) != array.shape[axis]:
        raise IndexError(f"dim {axis} of size {array.shape[axis]} does not split into {sizes}")
    shape = tuple(array.shape[:axis]) + sizes + tuple(array.shape[axis + 1 :])
    return LazyArray(shape, array.dtype, _Split(array, axis, sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class _Merge:
    """Read two neighbouring dims as one; whole rows of the outer one, then cut."""

    array: ArrayLike
    axis: int

    def __call__(self, box: Box) -> np.ndarray:
        axis, inner = self.axis, self.array.shape[self.axis + 1]
        first, last = box[axis].start // inner, -(-box[axis].stop // inner)
        rows = slice(first, max(first, last))
        read = np.asarray(self.array[box[:axis] + (rows, slice(None)) + box[axis + 1 :]])
        size = (rows.stop - rows.start) * inner
        read = read.reshape(read.shape[:axis] + (size,) + read.shape[axis + 2 :])
        start = box[axis].start - first * inner
        cut = slice(start, start + box[axis].stop - box[axis].start)
        return read[(slice(None),) * axis + (cut,)]


def merged(array: ArrayLike, axis: int) -> LazyArray:
    """The dims `axis` and `axis + 1` seen as one, the first outermost, as a view."""
    if not 0 <= axis < len(array.shape) - 1 or array.shape[axis + 1] < 1:
        raise IndexError(f"dims {axis} and {axis + 1} of {array.shape} cannot be merged")
    size = array.shape[axis] * array.shape[axis + 1]
    shape = tuple(array.shape[:axis]) + (size,) + tuple(array.shape[axis + 2 :])
    return LazyArray(shape, array.dtype, _Merge(array, axis))


@dataclasses.dataclass(frozen=True, eq=False)
class _Repeat:
    """Read the same elements for every index of a new leading dim."""

    array: ArrayLike

    def __call__(self, box: Box) -> np.ndarray:
        read = np.asarray(self.array[box[1:]])
        return np.broadcast_to(read, (box[0].stop - box[0].start, *read.shape))


def repeated(array: ArrayLike, count: int) -> LazyArray:
    """The array once for each index of a new leading dim, as a view."""
    return LazyArray((count, *array.shape), array.dtype, _Repeat(array))
