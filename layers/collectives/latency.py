"""LATENCY."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks, Index
from layers.collectives.ring import AxisName, Ring, run_steps


def allgather_matmul_latency(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)
    even = 1 - ring.size % 2

    def step(k: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        on, back, total = carry
        on, back = ring.hop(on, +1), ring.hop(back, -1)
        return on, back, total + (w.dot(on, ring.at(-k)) + w.dot(back, ring.at(k + even)))

    total = w.dot(x, ring.index)
    back = x
    if even:
        back = ring.hop(x, -1)
        total = total + w.dot(back, ring.at(1))
    *_, total = run_steps(step, (x, back, total), 1, (ring.size + 1) // 2)
    return total


def matmul_reducescatter_latency(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName, reduce_dtype: jnp.dtype
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)
    even = 1 - ring.size % 2
    last = (ring.size - 1) // 2

    def products(k: Index) -> tuple[Array, Array]:
        return (
            lax.optimization_barrier(w.dot(x, ring.at(last - k))),
            lax.optimization_barrier(w.dot(x, ring.at(k - last - even))),
        )

    def arrive(total: Array, d: int) -> Array:
        return ring.hop(total.astype(reduce_dtype), d).astype(jnp.float32)

    def step(k: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        on, back = carry
        p, q = products(k)
        return arrive(on, +1) + p, arrive(back, -1) + q

    if even:
        on, back = run_steps(step, products(0), 1, ring.size // 2)
        return on + arrive(back, -1)
    if ring.size == 1:
        return w.dot(x, ring.index)
    on, back = run_steps(step, products(0), 1, last)
    own = lax.optimization_barrier(w.dot(x, ring.index))
    return arrive(on, +1) + arrive(back, -1) + own
