"""THROUGHPUT."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks, Index
from layers.collectives.ring import AxisName, Ring, run_steps


def allgather_matmul_throughput(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)
    rows = x.shape[-1]
    half = halfway(rows)
    low, high = (0, half), (half, rows)

    def products(on: Array, back: Array, k: Index) -> Array:
        return w.dot(on, ring.at(-k), rows=low) + w.dot(back, ring.at(k), rows=high)

    def step(k: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        on, back, total = carry
        on, back = ring.hop(on, +1), ring.hop(back, -1)
        return on, back, total + products(on, back, k)

    on, back = x[..., :half], x[..., half:]
    *_, total = run_steps(step, (on, back, products(on, back, 0)), 1, ring.size)
    return total


def matmul_reducescatter_throughput(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName, reduce_dtype: jnp.dtype
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)
    cols = w.shape[2]
    half = halfway(cols)
    low, high = (0, half), (half, cols)

    def step(k: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        on, back = carry
        new_on = lax.optimization_barrier(w.dot(x, ring.at(-1 - k), cols=low))
        new_back = lax.optimization_barrier(w.dot(x, ring.at(1 + k), cols=high))
        arrived_on = ring.hop(on.astype(reduce_dtype), +1).astype(jnp.float32)
        arrived_back = ring.hop(back.astype(reduce_dtype), -1).astype(jnp.float32)
        return arrived_on + new_on, arrived_back + new_back

    first = (w.dot(x, ring.at(-1), cols=low), w.dot(x, ring.at(1), cols=high))
    on, back = run_steps(step, first, 1, ring.size)
    return jnp.concatenate([on, back], axis=-1)


def halfway(width: int) -> int:
    if width % 256 == 0 or width < 256:
        return (width + 1) // 2
    return (width // 2 + 127) // 128 * 128
