"""A ring of chips over one mesh axis, or over several taken as one.

A chip sits at `index`; `hop(x, +1)` hands every chip's x to the next one, so that a chip then holds
what its predecessor had. Over a tuple of axes the first is the major one, as everywhere in jax.

Worked example, size 4, seen from chip 1 that starts with shard 1: after one hop of +1 it holds shard 0,
after two shard 3 — `at(−step)` says which.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

AxisName = str | tuple[str, ...]
Carry = TypeVar("Carry")

MAX_UNROLLED_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Ring:
    """The chips along an axis. Use `Ring.over`, inside `shard_map`."""

    axis_name: AxisName
    size: int
    index: Int[Array, ""]

    @classmethod
    def over(cls, axis_name: AxisName) -> "Ring":
        """The ring over one axis name or a tuple of them."""
        return cls(axis_name, lax.axis_size(axis_name), lax.axis_index(axis_name))

    def at(self, offset: int | Int[Array, ""]) -> Int[Array, ""]:
        """The index of the chip `offset` places on, for −size ≤ offset."""
        offset = jnp.asarray(offset, jnp.int32) if isinstance(offset, int) else offset
        return lax.rem(self.index + offset + self.size, jnp.int32(self.size))

    def hop(self, x: Array, direction: int) -> Array:
        """What the chip `direction` places back held: x moves on by `direction`, +1 or −1."""
        return lax.ppermute(x, self.axis_name, [(i, (i + direction) % self.size) for i in range(self.size)])


def run_steps(body: Callable[[int | Int[Array, ""], Carry], Carry], carry: Carry, start: int, stop: int) -> Carry:
    """carry = body(step, carry) for each step; a python loop, or a rolled one on long rings."""
    if stop - start > MAX_UNROLLED_STEPS:
        return jax.lax.fori_loop(start, stop, body, carry)
    for step in range(start, stop):
        carry = body(step, carry)
    return carry
