"""A ring of chips over one mesh axis, or over several taken as one.

A chip sits at `index`; `hop(x, +1)` hands every chip's x to the next one, so that a chip then holds
what its predecessor had. Over a tuple of axes the first is the major one. So it is for jax's `axis_index`
and its other collectives, in whatever order the axes are named; `ppermute` alone (jax 0.10.2) counts
places in the mesh's own order. `Ring` names the axes to it in that order and translates the places.

What makes a TPU run a hop and a matmul at the same time is the order of its one instruction stream:
`collective-permute-start`, the matmul, `collective-permute-done`. The compiler chooses that order, and
two habits of it are stopped with barriers. It fuses `hop(total) + product` into the matmul, which then
waits for the hop: `alone(product)` keeps the addition out. And it likes to run all matmuls first and all
hops after, or the reverse: `after(x, total)` lets a step's matmul start only when the one before is done,
which leaves exactly one matmul to lie beside each hop.

Worked example, size 4, seen from chip 1 that starts with shard 1: after one hop of +1 it holds shard 0,
after two shard 3 — `at(−step)` says which.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

AxisName = str | tuple[str, ...]
Index = int | Int[Array, ""]
Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Ring:
    """The chips along an axis; made by `Ring.over`, inside `shard_map`.

    Attributes:
      axis_name: one mesh axis or a tuple of them.
      size: chips on the ring.
      index: this chip's place on it.
      mesh_axes: the same axes in the mesh's order.
      positions: of each place on the ring, its number when chips are counted in that order.
      max_unrolled: steps that are written out; a longer ring becomes a rolled loop.
    """

    axis_name: AxisName
    size: int
    index: Int[Array, ""]
    mesh_axes: tuple[str, ...]
    positions: tuple[int, ...]
    max_unrolled: int

    @classmethod
    def over(
        cls, axis_name: AxisName, max_unrolled: int, axes_in_order: tuple[str, ...] | None = None
    ) -> "Ring":
        """The ring over one axis name or a tuple of them.

        `axes_in_order` are all axes of the mesh, for code that runs on a chip outside `shard_map`.
        """
        names = axis_names(axis_name)
        in_order = jax.sharding.get_abstract_mesh().axis_names if axes_in_order is None else axes_in_order
        mesh_axes = tuple(sorted(names, key=in_order.index))
        numbers = np.arange(lax.axis_size(names)).reshape([lax.axis_size(name) for name in mesh_axes])
        positions = numbers.transpose([mesh_axes.index(name) for name in names]).ravel().tolist()
        index = lax.axis_index(axis_name)
        return cls(axis_name, len(positions), index, mesh_axes, tuple(positions), max_unrolled)

    @property
    def opposite(self) -> int | None:
        """Hops to the chip that is equally far in both directions; None on an odd ring."""
        return None if self.size % 2 else self.size // 2

    def at(self, offset: Index) -> Int[Array, ""]:
        """The index of the chip `offset` places on, for −size ≤ offset ≤ size."""
        return lax.rem(self.index + jnp.asarray(offset, jnp.int32) + self.size, jnp.int32(self.size))

    def hop(self, x: Array, direction: int) -> Array:
        """What the chip `direction` places back held: x moves on by `direction`, +1 or −1."""
        target = self.positions[direction:] + self.positions[:direction]
        return lax.ppermute(x, self.mesh_axes, list(zip(self.positions, target, strict=True)))

    def run(self, step: Callable[[Index, Carry], Carry], carry: Carry, start: int, stop: int) -> Carry:
        """carry = step(k, carry) for k from start to stop − 1, written out unless the ring is long."""
        if self.size > self.max_unrolled and start < stop:
            return lax.fori_loop(start, stop, step, carry)
        for k in range(start, stop):
            carry = step(k, carry)
        return carry


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The axes as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else axis_name


def after(x: Num[Array, "..."], *earlier: Array) -> Num[Array, "..."]:
    """x, but whatever reads it is scheduled behind the computation of `earlier`."""
    return lax.optimization_barrier((x, *earlier))[0]


def alone(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """The product, not to be fused with what follows."""
    return lax.optimization_barrier(product)


def require_varying(axis_name: AxisName, size: int, *arrays: Array) -> None:
    """Refuse what is the same on all chips of an axis: its sum over them would count it `size` times.

    Raises:
      ValueError: none of the arrays varies over one of the axes, or `shard_map` runs with check_vma=False.
    """
    varying = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    missing = [name for name in axis_names(axis_name) if name not in varying]
    if missing and size > 1:
        raise ValueError(
            f"nothing here varies over mesh axis {', '.join(missing)}; allowed: a shard or a partial sum "
            "over it, under shard_map with check_vma=True"
        )
