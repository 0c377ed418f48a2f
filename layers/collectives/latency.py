"""LATENCY: full shards travel both ways round from the start, for half as many hop times.

On an odd ring a chip's shard goes (N − 1)/2 places each way. On an even one the opposite chip would be
reached from both sides, so that one direction gets a head start of one hop (all-gather: a prologue;
reduce-scatter, the same in reverse: an epilogue), and N/2 − 1 two-way hops do the rest. Every step has
two full products; the two chunks do not lie side by side in canonical order, and joining them into one
matmul of double width would copy weights.

Worked example, 4 chips, chip 0. All-gather: x₁ arrives beside x₀ w[0]; then x₃ and x₂ beside x₁ w[1];
then x₃ w[3] and x₂ w[2]. Reduce-scatter: its products for chips 1 and 2 leave, one on, one back; those
for chips 0 and 3 join what arrives, and the sum for chip 3 makes one more hop back.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks
from layers.collectives.ring import Index, Ring, after, alone


def allgather_matmul_latency(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring
) -> Float32[Array, "*batch cols"]:
    """N products in ⌈N/2⌉ steps, ⌈(N − 1)/2⌉ hop times of x."""
    ahead = 0 if ring.opposite is None else 1

    def step(k: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        on, back, total = carry
        on, back = after(ring.hop(on, +1), total), after(ring.hop(back, -1), total)
        total = total + w.dot(on, ring.at(-k))
        return on, back, total + w.dot(back, ring.at(k + ahead))

    on, back, total = x, x, w.dot(x, ring.index)
    if ahead:
        back = after(ring.hop(x, -1), total)
        total = total + w.dot(back, ring.at(1))
    *_, total = ring.run(step, (on, back, total), 1, (ring.size + 1) // 2)
    return total


def matmul_reducescatter_latency(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring, reduce_dtype: str
) -> Float32[Array, "*batch cols"]:
    """N products in ⌈N/2⌉ steps, ⌈(N − 1)/2⌉ hop times of a sum of the result's size."""
    ahead = 0 if ring.opposite is None else 1
    farthest = (ring.size - 1) // 2

    def products(x: Array, k: Index) -> tuple[Array, Array]:
        on = alone(w.dot(x, ring.at(farthest - k)))
        return on, alone(w.dot(x, ring.at(k - farthest - ahead)))

    def arrive(total: Array, direction: int) -> Array:
        return ring.hop(total, direction).astype(jnp.float32)

    def step(k: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        on, back = (total.astype(reduce_dtype) for total in carry)
        new_on, new_back = products(after(x, on, back), k)
        return arrive(on, +1) + new_on, arrive(back, -1) + new_back

    if ahead:
        on, back = ring.run(step, products(x, 0), 1, farthest + 1)
        return on + arrive(back.astype(reduce_dtype), -1)
    if ring.size == 1:
        return w.dot(x, ring.index)
    carry = ring.run(step, products(x, 0), 1, farthest)
    on, back = (total.astype(reduce_dtype) for total in carry)
    own = alone(w.dot(after(x, on, back), ring.index))
    return arrive(on, +1) + arrive(back, -1) + own
