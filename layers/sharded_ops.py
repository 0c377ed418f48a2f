"""What a chip does with its part of an array, inside `shard_map`.

Worked example: on 2,2,2 the residual of embed 240 is split over x, y and z, 30 numbers a chip. Chip (1, 0, 1)
holds part 1·4 + 0·2 + 1 = 5: the numbers 150 to 179.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from layers.hparams import Norm
from layers.layout import CHUNK_AXES
from layers.norm import NormParams, scale_and_shift


def local_part(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """This chip's part of a dim that is split over `axes`, major first; x itself over no axes."""
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)


def all_gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """All parts of a dim that is split over `axes`, major first; x itself over no axes."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def held_chunks(
    vector: Float[Array, "chunks width"], held: tuple[str, ...]
) -> Float[Array, "groups X width"]:
    """Of one entry a chunk of the mesh those of the chunks along `held` and at this chip's place otherwise.

    Chunks stand in (y, z, x) order. The groups are those along y and z, the second dim those along x.
    """
    if not held:
        return lax.dynamic_slice_in_dim(vector, lax.axis_index(CHUNK_AXES), 1)[None]
    grid = vector.reshape(*(lax.axis_size(axis) for axis in CHUNK_AXES), -1)
    for dim, axis in enumerate(CHUNK_AXES):
        grid = grid if axis in held else local_part(grid, (axis,), dim)
    return grid.reshape(-1, *grid.shape[2:])


def zeros_varying_as(
    like: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Zeros that vary over those of `axes` over which `like` does, to be written into."""
    varying = jax.typeof(like).manual_axis_type.varying
    return lax.pcast(jnp.zeros(shape, dtype), tuple(axis for axis in axes if axis in varying), to="varying")


@jax.named_scope("residual")
def sharded_norm(
    x: Float[Array, "*batch part"],
    params: NormParams,
    kind: Norm,
    eps: float,
    axes: tuple[str, ...],
) -> Float[Array, "*batch part"]:
    """`norm.apply_norm` of a dim split over `axes`, () for whole; gain and bias are whole and sliced here."""
    wide = x.astype(jnp.float32)
    width = x.shape[-1] * lax.axis_size(axes)
    if kind is Norm.LAYER:
        wide = wide - _sum(wide, axes) / width
    square = _sum(jnp.square(wide), axes) / width
    mine = jax.tree.map(lambda vector: local_part(vector, axes, 0), params)
    return scale_and_shift(wide * lax.rsqrt(square + eps), mine).astype(x.dtype)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    total = jnp.sum(x, axis=-1, keepdims=True)
    return lax.psum(total, axes) if axes else total
