"""How sharded attention runs, decided from how its arrays lie.

Batch and head sharding run on each chip alone. Time sharding of queries and keys over the same axes runs
the ring; queries alone sharded over time meet whole keys at their own positions. What does not fit is
brought into one of these forms: queries that are whole are cut like their keys, keys over other axes than
their queries are moved, a dim that does not divide is made whole. Sharding of the width is refused.

Worked example: q [batch.x, time.y, heads, qkv] and k [batch, keys.y, kv_heads, qkv] give batch (x), time (y),
keys (y): k is cut over x, which costs nothing, and rings of the chips along y run beside each other.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

Axes = tuple[str, ...]
Spec = tuple[Axes, Axes, Axes, Axes]
"""Mesh axes of batch, time, heads and width."""


@dataclasses.dataclass(frozen=True)
class FlashShapes:
    """Sizes of the whole arrays."""

    batch: int
    time: int
    keys: int
    heads: int
    kv_heads: int


@dataclasses.dataclass(frozen=True)
class FlashPlacement:
    """Mesh axes of each dim of q, k and v; `keys` is () or equal to `time`."""

    batch: Axes
    time: Axes
    keys: Axes
    heads: Axes
    kv_heads: Axes

    @property
    def summed(self) -> Axes:
        """Axes over which dk and dv of a chip are partial sums: queries are split there, keys are not."""
        whole_time = () if self.keys else self.time
        return whole_time + (() if self.kv_heads else self.heads)


def spec_axes(spec: Sequence[str | Sequence[str] | None]) -> Spec:
    """A partition spec of four dims as tuples of axes."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    batch, time, heads, width = entries + [()] * (4 - len(entries))
    return batch, time, heads, width


def place(q: Spec, kv: Sequence[Spec], shapes: FlashShapes, mesh: Mapping[str, int]) -> FlashPlacement:
    """The placement nearest to where q, and k and v, lie.

    Raises:
      ValueError: the width of a head is sharded.
    """
    for name, spec in zip(("q", "k", "v"), (q, *kv), strict=True):
        if spec[3]:
            raise ValueError(
                f"the width (last dim) of {name} is sharded over {', '.join(spec[3])}; "
                "allowed: batch, time and heads; nearest: shard the heads instead"
            )
    size = {axes: math.prod(mesh[axis] for axis in axes) for spec in (q, *kv) for axes in spec}
    k = tuple(next((spec[dim] for spec in kv if spec[dim]), ()) for dim in range(4))

    def fits(axes: Axes, length: int, taken: Axes) -> bool:
        return length % size[axes] == 0 and not set(axes) & set(taken)

    def first(options: Sequence[Axes], length: int, taken: Axes = ()) -> Axes:
        return next((axes for axes in options if axes and fits(axes, length, taken)), ())

    batch = first((q[0], k[0]), shapes.batch)
    heads = first((q[2], k[2]), shapes.heads, batch)
    keys = first((q[1], k[1]) if k[1] else (), math.gcd(shapes.time, shapes.keys), batch + heads)
    time = keys or first((q[1],), shapes.time, batch + heads)
    return FlashPlacement(batch, time, keys, heads, heads if fits(heads, shapes.kv_heads, ()) else ())
