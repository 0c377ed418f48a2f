"""Attention's own sharding: from heads over all chips to batch or positions over some of them, and back.

The projections leave every chip with the rows of the batch that its layout gives it and a few heads. With
AttnAllToAll the chips of the traded axes trade: each keeps its part of the rows and gets those rows' heads
from the others. Keys and values, few and small, are made where they are needed: each chip contracts its slice
of embed, and one reduction leaves each with its rows and its kv heads.

Shapes, B' = batch rounded up to the traded axes, K padded kv heads:
  q  [batch, time, heads.YZX, qkv] → [batch'.A, time, heads.rest, qkv]     all_to_all over A, one call
  kv [batch, time, 2·K·qkv] {unreduced} → [batch'.A, time, 2, a chip's kv heads, qkv]

In a weight-gathered layout a chip starts with the heads of all chunks along the gathered axes, and A is of
the other axes; the rest is the same.

Over the axes C of a context, which deal positions (`striped_cache`), prefill trades heads for times in the
same way, by an all-to-all of its own. A decode step has one token: every chip of C gets all heads of it, and
keeps those that it had when attention is done:

  prefill  q [batch, time, heads.C, qkv] → [batch, time.C, heads, qkv]
  decode   q [batch, 1, heads.C, qkv] → [batch, 1, heads, qkv]

Worked example: 8 heads, batch 4, mesh 2,2,2, AXES_YZ: a chip starts with one head of 4 rows and ends with
the 4 heads of its x half for one row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.head_order import KVFactors
from layers.layout import AttentionAxes
from layers.mesh_shape import AXES
from layers.sharded_ops import local_part


def pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    """Zero rows up to a multiple."""
    missing = -x.shape[0] % multiple
    return x if not missing else jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def my_rows(x: jax.Array, attention: AttentionAxes) -> jax.Array:
    """Of the rows `[batch, …]` that the projections have on this chip those that attention gives it."""
    return local_part(pad_rows(x, lax.axis_size(attention.traded)), attention.traded, 0)


def _regroup(x: jax.Array, order: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    """Reorders heads [batch, time, (order…, heads of a chunk), qkv] so that axes are major as wanted."""
    if order == wanted:
        return x
    batch, time, _, qkv = x.shape
    split = x.reshape(batch, time, *(lax.axis_size(axis) for axis in order), -1, qkv)
    places = [2 + order.index(axis) for axis in wanted]
    tail = 2 + len(order)
    return split.transpose(0, 1, *places, tail, tail + 1).reshape(batch, time, -1, qkv)


def _logical_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in axes)


@jax.named_scope("attention")
def scatter_rows(
    q: Float[Array, "batch time heads qkv"], attention: AttentionAxes
) -> Float[Array, "rows times more_heads qkv"]:
    """All rows of this chip's heads → its rows, and times, of all heads of the axes traded and joined."""
    stored = attention.joined + attention.traded + attention.held
    if attention.traded:
        rows = pad_rows(q, lax.axis_size(attention.traded))
        q = lax.all_to_all(rows, attention.traded, split_axis=0, concat_axis=2, tiled=True)
    if attention.joined and attention.ring:
        q = lax.all_to_all(q, attention.joined, split_axis=1, concat_axis=2, tiled=True)
    elif attention.joined:
        q = lax.all_gather(q, attention.joined, axis=2, tiled=True)
    return _regroup(q, stored, _logical_order(stored))


@jax.named_scope("attention")
def gather_rows(
    a: Float[Array, "rows times more_heads qkv"], attention: AttentionAxes, batch: int
) -> Float[Array, "batch time heads qkv"]:
    """The inverse of `scatter_rows`; padded rows are dropped."""
    stored = attention.joined + attention.traded + attention.held
    a = _regroup(a, _logical_order(stored), stored)
    if attention.joined and attention.ring:
        a = lax.all_to_all(a, attention.joined, split_axis=2, concat_axis=1, tiled=True)
    else:
        a = local_part(a, attention.joined, 2)
    if not attention.traded:
        return a
    return lax.all_to_all(a, attention.traded, split_axis=2, concat_axis=0, tiled=True)[:batch]


def reduce_kv(
    partial: Float[Array, "batch time 2 kv_heads qkv"], attention: AttentionAxes, reduce_dtype: str
) -> Float[Array, "rows times 2 my_kv_heads qkv"]:
    """Sums every chip's share of k and v, and keeps this chip's rows, times and kv heads; float32.

    Over an axis along which every chip has kv heads of its own the sum is scattered; over the others, whose
    chips share them, it is the same on all.
    """
    rows = pad_rows(partial, lax.axis_size(attention.traded))
    rows = reduce_scatter(rows, attention.traded, reduce_dtype, dimension=0)
    if attention.ring:
        rows = reduce_scatter(rows, attention.joined, reduce_dtype, dimension=1)
    factors = _factors(partial.shape[3])
    split = rows.reshape(*rows.shape[:3], *factors.shape, rows.shape[-1])
    own = tuple(a for a in attention.heads if getattr(factors, a) == lax.axis_size(a) > 1)
    for axis in own:
        split = reduce_scatter(split, axis, reduce_dtype, dimension=3 + AXES.index(axis))
    shared = tuple(axis for axis in attention.heads if axis not in own)
    whole_times = () if attention.ring else attention.joined
    mine = _take_digits(all_reduce(split, shared + whole_times, reduce_dtype), shared, 3)
    return mine.reshape(*rows.shape[:3], -1, rows.shape[-1])


def my_kv_heads(x: jax.Array, attention: AttentionAxes, dim: int) -> jax.Array:
    """This chip's kv heads of a dim that holds them all: its own, or one that it shares with others."""
    shape = _factors(x.shape[dim]).shape
    split = x.reshape(*x.shape[:dim], *shape, *x.shape[dim + 1 :])
    mine = _take_digits(split, attention.heads, dim)
    return mine.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def _factors(kv_heads: int) -> KVFactors:
    return KVFactors.of(kv_heads, *(lax.axis_size(axis) for axis in AXES))


def _take_digits(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """x [… (from `dim`) x, y, z, …] digits of kv heads → along `axes` the digit that this chip uses."""
    for axis in axes:
        at = dim + AXES.index(axis)
        if x.shape[at] > 1:
            digit = lax.axis_index(axis) * x.shape[at] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(x, digit, 1, axis=at)
    return x
