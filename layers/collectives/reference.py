"""REFERENCE: one XLA collective and one einsum; the oracle of the rings."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks
from layers.collectives.ring import AxisName


def allgather_matmul_reference(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName
) -> Float32[Array, "*batch cols"]:
    """Gather every chip's x, contract chunks and rows together."""
    gathered = lax.all_gather(x, axis_name)
    return jnp.einsum("n...r,nrc->...c", gathered, w.all().astype(x.dtype), preferred_element_type=jnp.float32)


def matmul_reducescatter_reference(
    x: Float[Array, "*batch rows"], w: Chunks, axis_name: AxisName, reduce_dtype: jnp.dtype
) -> Float32[Array, "*batch cols"]:
    """Multiply all chunks at once, then reduce-scatter over the chunk dim."""
    product = jnp.einsum("...r,nrc->n...c", x, w.all().astype(x.dtype), preferred_element_type=jnp.float32)
    reduced = lax.psum_scatter(product.astype(reduce_dtype), axis_name)
    return lax.optimization_barrier(reduced).astype(jnp.float32)
