"""REFERENCE: one XLA collective and one einsum; the oracle of the rings.

Both einsums contract or make the chunk dim as a dim of its own. For a reshape of the weight to
`[chunks · rows, cols]` the TPU compiler may copy the whole layer's weights.

Worked example, 4 chips, x [8, 1, 1280] and w [4, 1280, 1024]: the gathered x is [4, 8, 1, 1280], and
einsum contracts 4 × 1280. The other way round, x [8, 1, 1024] and w [4, 1024, 2304] make a partial sum
[4, 8, 1, 2304], of which chip i gets the sum of all chips' [i].
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.products import Chunks
from layers.collectives.reductions import reduce_scatter
from layers.collectives.ring import Ring


def allgather_matmul_reference(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring
) -> Float32[Array, "*batch cols"]:
    """Gather every chip's x, then contract chunks and rows together."""
    gathered = lax.all_gather(x, ring.axis_name)
    return jnp.einsum("n...r,nrc->...c", gathered, w.all(x.dtype), preferred_element_type=jnp.float32)


def matmul_reducescatter_reference(
    x: Float[Array, "*batch rows"], w: Chunks, ring: Ring, reduce_dtype: str
) -> Float32[Array, "*batch cols"]:
    """Multiply with all chunks at once, then reduce-scatter over the chunk dim."""
    product = jnp.einsum("...r,nrc->n...c", x, w.all(x.dtype), preferred_element_type=jnp.float32)
    return reduce_scatter(product, ring.axis_name, reduce_dtype, dimension=0)[0]
