"""ONE_WAY: everything travels in one direction, a full shard a hop.

All-gather: a chip multiplies the shard that it holds while the next one arrives from its predecessor.
Reduce-scatter: a running sum arrives from the predecessor while the chip makes its own product for the
same destination.

Worked example, 4 chips, chip 0. All-gather: x₀ w[0] beside hop 1, x₃ w[3] beside hop 2, x₂ w[2] beside
hop 3, then x₁ w[1]. Reduce-scatter: its product for chip 3 leaves; as sums of others arrive it adds its
products for chips 2, 1 and, last, for itself.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks
from layers.collectives.ring import Index, Ring, after, alone


def allgather_matmul_one_way(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring
) -> Float32[Array, "*batch cols"]:
    """N products, N − 1 hops of x."""

    def step(k: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        shard, total = carry
        arrived = after(ring.hop(shard, +1), total)
        return arrived, total + w.dot(arrived, ring.at(-k))

    _, total = ring.run(step, (x, w.dot(x, ring.index)), 1, ring.size)
    return total


def matmul_reducescatter_one_way(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring, reduce_dtype: str
) -> Float32[Array, "*batch cols"]:
    """N products, N − 1 hops of a sum of the result's size."""

    def step(k: Index, total: Array) -> Array:
        leaving = total.astype(reduce_dtype)
        product = alone(w.dot(after(x, leaving), ring.at(-1 - k)))
        return ring.hop(leaving, +1).astype(jnp.float32) + product

    return ring.run(step, w.dot(x, ring.at(-1)), 1, ring.size)
