"""Sizes of the three mesh axes, as data; imports no jax, so that a command can read them first.

A mesh is x × y × z chips, of any sizes. The text form is "x,y,z". What a mesh means on devices, and
which chips become which axis, is `layers.mesh`.

Worked example: `MeshShape.parse("4,2,1")` has sizes (4, 2, 1) and size 8; on a CPU it needs 8 host
devices. Eight devices can also be 8,1,1 or 2,2,2: `legal_shapes(8)` lists all ten.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from layers.errors import UserError

AXES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Chips along x, y and z."""

    x: int = 1
    y: int = 1
    z: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"mesh axis {axis} has size {size!r}; allowed: integers from 1; nearest: 1")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape of "x,y,z", three positive integers.

        Raises:
          UserError: another count, a zero or something that is no integer, with the nearest legal text.
        """
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != len(AXES) or not all(re.fullmatch(r"[0-9]+", part) and int(part) for part in parts):
            raise UserError(
                f"mesh {text!r} is not three positive integers x,y,z; nearest legal: {_nearest_text(text)}"
            )
        return cls(*map(int, parts))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(x, y, z)."""
        return self.x, self.y, self.z

    @property
    def size(self) -> int:
        """Chips of the whole mesh."""
        return math.prod(self.sizes)

    def over(self, axes: Iterable[str]) -> int:
        """Chips along the named axes taken together; 1 for none."""
        return math.prod(self.sizes[AXES.index(axis)] for axis in axes)

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))


def host_devices_needed(shape: MeshShape) -> int:
    """How many host devices a CPU must pretend to have before jax starts, for this mesh."""
    return shape.size


def legal_shapes(devices: int) -> list[MeshShape]:
    """Every x × y × z that uses exactly `devices` chips, the largest x first."""
    return [
        MeshShape(x, y, devices // (x * y))
        for x in range(devices, 0, -1)
        if devices % x == 0
        for y in range(devices // x, 0, -1)
        if devices // x % y == 0
    ]


def nearest_shape(shape: MeshShape, shapes: Sequence[MeshShape]) -> MeshShape:
    """Of `shapes` the one whose axes differ least from `shape`'s, by ratio."""

    def distance(other: MeshShape) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(shape.sizes, other.sizes, strict=True))

    return min(shapes, key=distance)


def _nearest_text(text: str) -> str:
    """The numbers that the text does have, as integers from 1, cut or filled up to three."""
    sizes = [_nearest_size(part) for part in re.split(r"[,x×\s]+", text)]
    return str(MeshShape(*(sizes + [1] * len(AXES))[: len(AXES)]))


def _nearest_size(text: str) -> int:
    try:
        return max(1, round(float(text)))
    except (ValueError, OverflowError):
        return 1
