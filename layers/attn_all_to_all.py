"""Attention's own sharding: from heads over all chips to batch over some of them, and back.

The projections leave every chip with all rows of the batch and a few heads. With AttnAllToAll the chips of
the batch axes trade: each keeps its part of the rows and gets those rows' heads from the others. Keys and
values, few and small, are made where they are needed: each chip contracts its slice of embed, and one
reduction over the mesh leaves each with its rows and its kv heads.

Shapes, B' = batch rounded up to the batch shards, M = head shards, H and K padded heads and kv heads:
  q  [batch, time, heads.YZX, qkv] → [batch'.A, time, heads.rest, qkv]     all_to_all over A, one call
  kv [batch, time, 2·K·qkv] {x, y, z unreduced} → [batch'.A, time, 2, max(1, K/M), qkv]

Worked example: 8 heads, batch 4, mesh 2,2,2, AXES_YZ: a chip starts with one head of 4 rows and ends with
the 4 heads of its x half for one row.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.head_order import padded_batch
from layers.layout import AttnAllToAll
from layers.mesh_shape import AXES
from layers.sharded_ops import local_part


def _size(axes: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(axis) for axis in axes)


def pad_batch(x: jax.Array, setting: AttnAllToAll) -> jax.Array:
    """Zero rows up to a multiple of the batch shards."""
    missing = padded_batch(x.shape[0], _size(setting.batch_axes)) - x.shape[0]
    return x if not missing else jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def my_rows(x: jax.Array, setting: AttnAllToAll) -> jax.Array:
    """The rows of a replicated `[batch, …]` array that attention gives to this chip."""
    return local_part(pad_batch(x, setting), setting.batch_axes, 0)


def _regroup(x: jax.Array, order: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    """Reorders heads [batch, time, (order…, heads of a chip), qkv] so that axes are major as wanted."""
    if order == wanted:
        return x
    batch, time, _, qkv = x.shape
    split = x.reshape(batch, time, *(lax.axis_size(axis) for axis in order), -1, qkv)
    places = [2 + order.index(axis) for axis in wanted]
    tail = 2 + len(order)
    return split.transpose(0, 1, *places, tail, tail + 1).reshape(batch, time, -1, qkv)


def _logical_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


def scatter_rows(
    q: Float[Array, "batch time heads qkv"], setting: AttnAllToAll
) -> Float[Array, "rows time more_heads qkv"]:
    """All rows of this chip's heads → this chip's rows of all the heads that the batch axes held."""
    axes = setting.batch_axes
    if not axes:
        return q
    traded = lax.all_to_all(pad_batch(q, setting), axes, split_axis=0, concat_axis=2, tiled=True)
    return _regroup(traded, axes, _logical_order(axes))


def gather_rows(
    a: Float[Array, "rows time more_heads qkv"], setting: AttnAllToAll, batch: int
) -> Float[Array, "batch time heads qkv"]:
    """The inverse of `scatter_rows`; padded rows are dropped."""
    axes = setting.batch_axes
    if not axes:
        return a
    stored = _regroup(a, _logical_order(axes), axes)
    traded = lax.all_to_all(stored, axes, split_axis=2, concat_axis=0, tiled=True)
    return traded[:batch]


def reduce_kv(
    partial: Float[Array, "batch time 2 kv_heads qkv"], setting: AttnAllToAll, reduce_dtype: str
) -> Float[Array, "rows time 2 my_kv_heads qkv"]:
    """Sums every chip's share of k and v, and keeps this chip's rows and kv heads; float32."""
    rows = reduce_scatter(pad_batch(partial, setting), setting.batch_axes, reduce_dtype, dimension=0)
    heads = setting.head_axes
    if heads and rows.shape[3] % _size(heads) == 0:
        return reduce_scatter(rows, heads, reduce_dtype, dimension=3)
    return my_kv_heads(all_reduce(rows, heads, reduce_dtype), setting, 3)


def my_kv_heads(x: jax.Array, setting: AttnAllToAll, dim: int) -> jax.Array:
    """This chip's kv heads of a dim that holds them all: a part of them, or the one it shares with others."""
    axes, kv_heads = setting.head_axes, x.shape[dim]
    shards = _size(axes)
    if kv_heads % shards == 0:
        return local_part(x, axes, dim)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * kv_heads // shards, 1, axis=dim)
