"""ONE_WAY."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks, Index
from layers.collectives.ring import AxisName, Ring, run_steps


def allgather_matmul_one_way(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)

    def step(k: Index, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        shard, total = carry
        arriving = ring.hop(shard, +1)
        return arriving, total + w.dot(arriving, ring.at(-k))

    _, total = run_steps(step, (x, w.dot(x, ring.index)), 1, ring.size)
    return total


def matmul_reducescatter_one_way(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName, reduce_dtype: jnp.dtype
) -> Float32[Array, "*batch cols"]:
    ring = Ring.over(axis_name)

    def step(k: Index, total: Array) -> Array:
        product = lax.optimization_barrier(w.dot(x, ring.at(-1 - k)))
        return ring.hop(total.astype(reduce_dtype), +1).astype(jnp.float32) + product

    return run_steps(step, w.dot(x, ring.at(-1)), 1, ring.size)
