"""Weights that travel: every chip of a ring multiplies every other chip's shard, one after another.

A weight-gathered layout keeps activations where they are and lets the weights pass by, so that at no time a
chip holds more than its own shard and the ones in flight. `walk` brings the shards of one axis in the order
of a mode, `groups` repeats that over further axes: a shard moves one place along them while its group is
being walked, on links that the inner ring does not use.

  REFERENCE   one all-gather, then the products
  ONE_WAY     N − 1 hops of a shard in one direction
  THROUGHPUT  N − 1 hops of half a shard in each direction
  LATENCY     ⌈(N − 1)/2⌉ hop times of a shard in both directions

Each product is scheduled behind the one before it (`ring.after`), which leaves one to lie beside each hop,
and keeps a compiler from doing all hops first, which would gather the weights after all. Steps are written
out, never a rolled loop.

Worked example, 4 chips, chip 0, ONE_WAY: x · shard 0 beside hop 1, then shard 3 beside hop 2, shard 2 beside
hop 3, shard 1.
"""

from collections.abc import Callable, Iterator

import jax
from jax import lax
from jaxtyping import Array

from layers.collectives.mode import CollectiveMode
from layers.collectives.products import Part, halves
from layers.collectives.ring import Index, Ring, after

Visit = Callable[[Array, Index, Part], Array]
"""(piece of a shard, its place on the ring, its range of the leading dim) → what the next one waits for."""


def walk(shard: Array, ring: Ring, mode: CollectiveMode, visit: Visit) -> None:
    """Calls `visit` with every shard of the ring, this chip's own first, whole or in two pieces.

    A shard is cut along its leading dim, which has at least as many entries as the ring has chips.
    """
    _WALKS[mode](shard, ring, visit)


def groups(shard: Array, ring: Ring, mode: CollectiveMode) -> "Iterator[tuple[Index, Array, Fence]]":
    """(place on the ring, the shard from there, what to tell when its products are made), own place first."""
    if mode is CollectiveMode.REFERENCE and ring.size > 1:
        gathered = lax.all_gather(shard, ring.axis_name)
        yield from ((index, gathered[index], Fence()) for index in range(ring.size))
        return
    for step in range(ring.size):
        fence = Fence()
        arriving = ring.hop(shard, +1) if step < ring.size - 1 else shard
        yield ring.at(-step), shard, fence
        shard = arriving if fence.product is None else after(arriving, fence.product)


class Fence:
    """The last product of a group, behind which the next group is scheduled."""

    product: Array | None = None

    def set(self, product: Array) -> None:
        """Names the product."""
        self.product = product


def _whole(shard: Array) -> Part:
    return Part(0, shard.shape[0])


def _reference(shard: Array, ring: Ring, visit: Visit) -> None:
    gathered = lax.all_gather(shard, ring.axis_name) if ring.size > 1 else shard[None]
    for index in range(ring.size):
        visit(gathered[index], index, _whole(shard))


def _one_way(shard: Array, ring: Ring, visit: Visit) -> None:
    whole = _whole(shard)
    done = visit(shard, ring.index, whole)
    for step in range(1, ring.size):
        shard = after(ring.hop(shard, +1), done)
        done = visit(shard, ring.at(-step), whole)


def _throughput(shard: Array, ring: Ring, visit: Visit) -> None:
    if ring.size == 1:
        visit(shard, ring.index, _whole(shard))
        return
    first, second = halves(shard.shape[0])
    on, back = shard[: first.stop], shard[first.stop :]
    visit(on, ring.index, first)
    done = visit(back, ring.index, second)
    for step in range(1, ring.size):
        on, back = after(ring.hop(on, +1), done), after(ring.hop(back, -1), done)
        visit(on, ring.at(-step), first)
        done = visit(back, ring.at(step), second)


def _latency(shard: Array, ring: Ring, visit: Visit) -> None:
    whole, ahead = _whole(shard), 0 if ring.opposite is None else 1
    on, back = shard, shard
    done = visit(shard, ring.index, whole)
    if ahead:
        back = after(ring.hop(shard, -1), done)
        done = visit(back, ring.at(1), whole)
    for step in range(1, (ring.size + 1) // 2):
        on, back = after(ring.hop(on, +1), done), after(ring.hop(back, -1), done)
        visit(on, ring.at(-step), whole)
        done = visit(back, ring.at(step + ahead), whole)


_WALKS: dict[CollectiveMode, Callable[[jax.Array, Ring, Visit], None]] = {
    CollectiveMode.REFERENCE: _reference,
    CollectiveMode.ONE_WAY: _one_way,
    CollectiveMode.THROUGHPUT: _throughput,
    CollectiveMode.LATENCY: _latency,
}
