"""Moving one prefilled sequence into a slot of the decode cache, inside `shard_map`: where two layouts meet.

The row is fetched from the chips that hold it, in the heads that the decode layout gives each chip, and
written by the chips that own the slot. One sum does the fetching: over the axes that split the prefix's rows,
and over those that split its kv heads and will do so no longer; the chips without a part of the answer add
zeros. Heads split over an axis in both layouts stay where they are. Positions that are dealt over the same
axes in both stay too; otherwise they are gathered, and dealt anew if the decode layout deals them. No other
row is touched and no cache is copied.

Worked example: 8 slots over (y, z) of 2,2,2: slot 5 is local row 1 of the chips at part 2 of 4. From a prefix
gathered over XYZ (rows over x, y, z) the row is summed over x, y and z, then each chip keeps its x half of
the kv heads.
"""

import jax
import jax.numpy as jnp
from jax import lax

from layers.head_order import KVFactors
from layers.kv_cache import KVCache
from layers.layout import AttentionAxes
from layers.mesh_shape import AXES
from layers.sharded_ops import local_part
from layers.striped_cache import dealt, gathered


def insert_row(
    cache: KVCache,
    prefix: KVCache,
    row: jax.Array,
    slot: jax.Array,
    target: AttentionAxes | None = None,
    source: AttentionAxes | None = None,
    kv_heads: int = 1,
) -> KVCache:
    """`cache` with global row `row` of `prefix` in global row `slot`; of its positions those that there are.

    Args:
      target, source: how the cache and the prefix lie on the mesh; None on one device. A target that splits
        no rows (`AttentionAxes.whole_rows`) gets the row on every chip that holds its heads.
      kv_heads: of the whole model, padded.
    """
    dim = 1 if cache.stacked else 0  # of rows in [layers,] batch, kv_heads, time, … of numbers and of scales

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        if target is None or source is None:
            return _overwrite(whole, _row(_first(part, whole.shape[dim + 2], dim + 2), row, dim), slot, dim)
        room = whole.shape[dim + 2] * lax.axis_size(target.context)
        part = _first(part, -(-room // lax.axis_size(source.context)), dim + 2)
        held, at = _local(row, source.batch, part.shape[dim])
        fetched = _row(part, at, dim)
        fetched = jnp.where(held, fetched, jnp.zeros_like(fetched))
        fetched = _moved(fetched, source, target, kv_heads, dim + 1)
        fetched = _first(fetched, whole.shape[dim + 2], dim + 2)
        owned, at = _local(slot, target.batch, whole.shape[dim])
        return _overwrite(whole, jnp.where(owned, fetched, _part_of(whole, at, fetched, dim)), at, dim)

    return jax.tree.map(put, cache, prefix)


def _row(leaf: jax.Array, at: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(leaf, at, 1, dim)


def _first(leaf: jax.Array, count: int, dim: int) -> jax.Array:
    """The first entries of a dim, at most as many as there are."""
    return lax.slice_in_dim(leaf, 0, min(count, leaf.shape[dim]), axis=dim)


def _part_of(whole: jax.Array, at: jax.Array, part: jax.Array, dim: int) -> jax.Array:
    """What stands in a row where a part of it is to go."""
    return _first(_row(whole, at, dim), part.shape[dim + 2], dim + 2)


def _overwrite(leaf: jax.Array, row: jax.Array, at: jax.Array, dim: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(leaf, row, at, dim)


def _local(index: jax.Array, axes: tuple[str, ...], size: int) -> tuple[jax.Array, jax.Array]:
    """Whether this chip's `size` rows hold a global row, and where (0 if not)."""
    place = index - (lax.axis_index(axes) if axes else 0) * size
    held = (place >= 0) & (place < size)
    return held, jnp.where(held, place, 0)


def _moved(
    row: jax.Array, source: AttentionAxes, target: AttentionAxes, kv_heads: int, dim: int
) -> jax.Array:
    """A row in the source's kv heads and positions, zeros where it is not held → in the target's."""
    factors = KVFactors.of(kv_heads, *(lax.axis_size(axis) for axis in AXES))
    leaving = tuple(axis for axis in source.heads if axis not in target.heads)
    entering = tuple(axis for axis in target.heads if axis not in source.heads)
    digits = [1 if axis in source.heads else getattr(factors, axis) for axis in AXES]
    split = row.reshape(*row.shape[:dim], *digits, factors.rest, *row.shape[dim + 1 :])
    for axis in leaving:
        split = _at_own_digit(split, axis, dim + AXES.index(axis), getattr(factors, axis))
    summed = source.batch + leaving
    split = lax.psum(split, summed) if summed else split
    split = _moved_positions(split, source.context, target.context, dim + len(digits) + 1)
    for axis in entering:
        count, at = getattr(factors, axis), dim + AXES.index(axis)
        if count > 1:
            digit = lax.axis_index(axis) * count // lax.axis_size(axis)
            split = lax.dynamic_slice_in_dim(split, digit, 1, axis=at)
    return split.reshape(*row.shape[:dim], -1, *split.shape[dim + len(digits) + 1 :])


def _moved_positions(row: jax.Array, source: tuple[str, ...], target: tuple[str, ...], dim: int) -> jax.Array:
    """Positions dealt over the source's axes → dealt over the target's; () for in order."""
    if source == target:
        return row
    if source:
        row = lax.all_gather(row, source, axis=dim, tiled=True, to="invarying")
        row = gathered(row, lax.axis_size(source), dim)
    if not target:
        return row
    chips = lax.axis_size(target)
    missing = -row.shape[dim] % chips
    row = jnp.pad(row, [(0, missing if at == dim else 0) for at in range(row.ndim)])
    return local_part(dealt(row, chips, dim), target, dim)


def _at_own_digit(split: jax.Array, axis: str, dim: int, count: int) -> jax.Array:
    """A kv head as one of `count` along `axis`, zeros elsewhere; of chips that share it, the first has it."""
    sharers = lax.axis_size(axis) // count
    first = lax.rem(lax.axis_index(axis), sharers) == 0
    mine = jnp.where(first, split, jnp.zeros_like(split))
    if count == 1:
        return mine
    chosen = jnp.arange(count) == lax.axis_index(axis) // sharers
    return jnp.where(chosen.reshape([-1 if d == dim else 1 for d in range(split.ndim)]), mine, 0)
