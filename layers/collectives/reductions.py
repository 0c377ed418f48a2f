"""Sums over chips that travel in the dtype asked for and move no more than they must.

Two habits of the TPU compiler cost bytes or precision here. A reduce-scatter over the whole slice becomes
an all-reduce and a slice, twice the bytes; over one axis after another it stays what it is. And a cast
that follows a float32 sum is moved in front of it, so that bfloat16 travels; `optimization_barrier`
does not always stop that, a `reduce_precision` that changes no float32 did in every program tried.

Worked example: partial sums [64, 4096] float32 on 4,2,2, reduced over (y, z) into [64, 1024]: over y a
chip sends 512 KiB, then over z 256 KiB; 3/4 of the 1 MiB that it held, as for four chips in one go.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.collectives.ring import AxisName, axis_names, require_varying

FLOAT32_EXPONENT_BITS, FLOAT32_MANTISSA_BITS = 8, 23


def reduce_scatter(
    x: Float[Array, "..."], axis_name: AxisName, reduce_dtype: str, *, dimension: int
) -> Float32[Array, "..."]:
    """Sum over the chips of the axes and keep this chip's block of a dim.

    Args:
      x: this chip's partial sum; `dimension` is a multiple of the chips.
      axis_name: one axis or several, the first is the major one; () leaves x alone.
      reduce_dtype: what travels.
      dimension: the dim that is scattered.
    """
    names = axis_names(axis_name)
    require_varying(names, lax.axis_size(names), x)
    total = x.astype(reduce_dtype)
    for name in names:
        total = lax.psum_scatter(total, name, scatter_dimension=dimension, tiled=True)
    return pinned(total)


def all_reduce(x: Float[Array, "..."], axis_name: AxisName, reduce_dtype: str) -> Float32[Array, "..."]:
    """Sum over the chips of the axes, () for none; the same on all. `reduce_dtype` is what travels."""
    names = axis_names(axis_name)
    if not names:
        return x.astype(jnp.float32)
    require_varying(names, lax.axis_size(names), x)
    return pinned(lax.psum(x.astype(reduce_dtype), names))


def pinned(total: Float[Array, "..."]) -> Float32[Array, "..."]:
    """A sum as float32; if it travelled as that, the compiler moves no cast in front of it."""
    if total.dtype != jnp.float32:
        return total.astype(jnp.float32)
    return lax.reduce_precision(total, FLOAT32_EXPONENT_BITS, FLOAT32_MANTISSA_BITS)
