"""What a chip does with its part of an array, inside `shard_map`.

Worked example: on 2,2,2 the residual of embed 240 is split over x, y and z, 30 numbers a chip. Chip (1, 0, 1)
holds part 1·4 + 0·2 + 1 = 5: the numbers 150 to 179.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from layers.hparams import Norm
from layers.norm import NormParams, scale_and_shift


def local_part(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """This chip's part of a dim that is split over `axes`, major first; x itself over no axes."""
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)


def sharded_norm(
    x: Float[Array, "*batch part"],
    params: NormParams,
    kind: Norm,
    eps: float,
    axes: tuple[str, ...],
) -> Float[Array, "*batch part"]:
    """`norm.apply_norm` of a dim split over `axes`; gain and bias are whole and sliced here."""
    wide = x.astype(jnp.float32)
    width = x.shape[-1] * lax.axis_size(axes)
    if kind is Norm.LAYER:
        wide = wide - lax.psum(jnp.sum(wide, axis=-1, keepdims=True), axes) / width
    square = lax.psum(jnp.sum(jnp.square(wide), axis=-1, keepdims=True), axes) / width
    mine = jax.tree.map(lambda vector: local_part(vector, axes, 0), params)
    return scale_and_shift(wide * lax.rsqrt(square + eps), mine).astype(x.dtype)
