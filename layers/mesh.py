"""Devices arranged as an x × y × z mesh whose axes are physical ones.

A TPU knows where its chips sit. A ring over a mesh axis is only fast when neighbours on the mesh are
neighbours on the links, so devices are ordered by their coordinates: every physical axis is given to a
mesh axis, whole where the sizes allow it; several together make up a longer mesh axis, and one is split
where nothing else fits. Host devices and GPUs have no such place and are taken in the order of their ids.

The mesh has Auto axis types. With Explicit ones `shard_map` refuses an argument that lies otherwise than
its spec says, which would guard the weights — but the result of every step then carries its sharding in
its type, and plain indexing of a sharded dim outside a step raises. The guard that matters is had
without: a step jitted with `in_shardings` refuses a committed array of another sharding (a test holds
jax to that), so nothing is moved silently where it would cost a copy of the weights per step.

Where several physical axes make up one mesh axis, the last of them runs fastest. A path that turns round
at the end of a row would make every ring hop a single link, but the TPU compiler then no longer sees a
plane in it: on v4:4x4x4 its reduce-scatter over 4 × 4 chips went from two phases of 4 to one ring of 16.

Worked example: the 16 chips of `v4:2x2x4` as mesh 4,2,2. Physical z has 4 chips and becomes x; physical
x and y become z and y. As mesh 8,2,1, x is made of the physical axes x and z together.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from layers.errors import UserError
from layers.mesh_shape import AXES, MeshShape, legal_shapes, nearest_shape


@runtime_checkable
class Place(Protocol):
    """What is read of any device."""

    id: int
    platform: str


@runtime_checkable
class TpuPlace(Place, Protocol):
    """What is read of a TPU's device, beside its `slice_index`, which some lack."""

    coords: Sequence[int]
    core_on_chip: int


Factors = tuple[int, int, int]  # what one physical axis contributes to x, y and z


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of this shape over `devices`, by default all that there are.

    On host devices and GPUs a mesh may use fewer than there are: the first by id. On a TPU it uses all.

    Raises:
      UserError: the shape does not match the devices; the legal shapes are in the text.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange(shape: MeshShape, devices: Sequence[Place]) -> np.ndarray:
    """The devices as an array [x, y, z]; see `make_mesh`."""
    if devices[0].platform == "tpu":
        return _by_coordinates(shape, _grid(devices))
    if shape.size > len(devices):
        raise _mismatch(shape, len(devices), devices[0].platform, "or fewer devices")
    by_id = sorted(devices, key=lambda device: device.id)[: shape.size]
    return _object_array(by_id).reshape(shape.sizes)


def _by_coordinates(shape: MeshShape, grid: np.ndarray) -> np.ndarray:
    if shape.size != grid.size:
        place = f"tpu of {'x'.join(map(str, grid.shape))}"
        raise _mismatch(shape, grid.size, place, "all chips of a slice take part, idle ones would hang it")
    factors = min(_assignments(grid.shape, shape.sizes), key=_cost)
    split = grid.reshape([part for axis in factors for part in axis])
    parts, axes = len(grid.shape), len(AXES)
    order = [physical * axes + axis for axis in range(axes) for physical in range(parts)]
    return split.transpose(order).reshape(shape.sizes)


def _grid(devices: Sequence[TpuPlace]) -> np.ndarray:
    """The devices at their coordinates, cores of a chip last where a chip has several."""
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}
    if len(slices) > 1:
        raise UserError(f"the devices belong to {len(slices)} TPU slices; allowed: the devices of one slice")
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(axis=0)
    extents = tuple(int(extent) for extent in places.max(axis=0) + 1)
    if math.prod(extents) != len(devices) or max(Counter(map(tuple, places)).values()) > 1:
        raise UserError(
            f"{len(devices)} devices do not fill a box of chips (their coordinates span "
            f"{'x'.join(map(str, extents))}); allowed: whole slices or rectangular parts of one"
        )
    grid = np.empty(extents, dtype=object)
    for place, device in zip(places, devices, strict=True):
        grid[tuple(place)] = device
    return grid[..., 0] if extents[-1] == 1 else grid


def _assignments(physical: Sequence[int], wanted: Sequence[int]) -> Iterator[tuple[Factors, ...]]:
    """Every way to split each physical axis over x, y, z so that the products are `wanted`."""
    if not physical:
        if all(size == 1 for size in wanted):
            yield ()
        return
    for part in _factorings(physical[0]):
        if all(size % p == 0 for size, p in zip(wanted, part, strict=True)):
            rest = [size // p for size, p in zip(wanted, part, strict=True)]
            yield from ((part, *others) for others in _assignments(physical[1:], rest))


def _factorings(size: int) -> list[Factors]:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(a, b, size // (a * b)) for a, b in itertools.product(divisors, divisors) if size % (a * b) == 0]


def _cost(factors: Sequence[Factors]) -> tuple[int, int]:
    """Fewest pieces first (no axis split needlessly), then physical x as mesh x where there is a choice."""
    pieces = [
        (physical, axis) for physical, parts in enumerate(factors) for axis, p in enumerate(parts) if p > 1
    ]
    return len(pieces), sum(abs(physical - axis) for physical, axis in pieces)


def _mismatch(shape: MeshShape, found: int, where: str, remark: str) -> UserError:
    legal = legal_shapes(found)
    return UserError(
        f"mesh {shape} has {shape.size} chips and there are {found} ({where}); allowed: "
        f"{' '.join(map(str, legal))} ({remark}); nearest: {nearest_shape(shape, legal)}"
    )


def _object_array(devices: Sequence[Place]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array
