"""Moving one prefilled sequence into a slot of the decode cache, inside `shard_map`.

The row is fetched from the chips that hold it (one sum over the batch axes, in which all others contribute
zeros) and written by the chips that own the slot; no other row is touched and no cache is copied.

Worked example: 8 slots over (y, z) of 2,2,2: slot 5 is local row 1 of the chips at part 2 of 4.
"""

import jax
import jax.numpy as jnp
from jax import lax

from layers.kv_cache import KVCache


def insert_row(
    cache: KVCache, prefix: KVCache, row: jax.Array, slot: jax.Array, batch_axes: tuple[str, ...] = ()
) -> KVCache:
    """`cache` with global row `row` of `prefix` in global row `slot`.

    Both hold the same kv heads and number of positions a chip, and split the batch over `batch_axes`.
    """
    shard = lax.axis_index(batch_axes) if batch_axes else 0

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        axis = whole.ndim - 4  # [layers,] batch, kv_heads, time, qkv
        held, source = _local(row, shard, part.shape[axis])
        fetched = lax.dynamic_slice_in_dim(part, source, 1, axis)
        fetched = lax.psum(jnp.where(held, fetched, jnp.zeros_like(fetched)), batch_axes)
        owned, target = _local(slot, shard, whole.shape[axis])
        old = lax.dynamic_slice_in_dim(whole, target, 1, axis)
        return lax.dynamic_update_slice_in_dim(whole, jnp.where(owned, fetched, old), target, axis)

    return jax.tree.map(put, cache, prefix)


def _local(index: jax.Array, shard: int | jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Whether this chip's `size` rows hold a global row, and where (0 if not)."""
    place = index - shard * size
    held = (place >= 0) & (place < size)
    return held, jnp.where(held, place, 0)
