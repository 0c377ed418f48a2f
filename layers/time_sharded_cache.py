"""A KV cache whose positions are spread over chips: for few texts, and for texts longer than a chip holds.

Chip i of the axes holds the i-th stretch of every row's positions. Queries are the same on all chips; each
attends to its own keys, and the parts are joined by one maximum and one sum of outputs with their weights:
two all-reduces of batch × heads numbers and of batch × heads × (qkv + 1). A new token is written by the
chip that holds its position and by no other.

Data flow: q [batch, time, heads, qkv] on all chips → this chip's segment → attention → joined, the same on
all.

Worked example: 16,384 positions on 8 chips; chip 2 holds 4,096 to 6,143. A row of 5,000 valid keys has
2,048 on chips 0 and 1, 904 on chip 2 and none beyond; token 5,000 is written there at index 904.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from layers.attention import AttentionBlocks, attend
from layers.kv_cache import KVCache, Segment
from layers.ring_attention import vary_alike


def stretch_start(cache: KVCache, axes: tuple[str, ...]) -> Int[Array, ""]:
    """The position of this chip's first key; `cache` is its part."""
    return lax.axis_index(axes) * cache.time


def local_segment(
    cache: KVCache, layer: int | jax.Array, length: Int[Array, " batch"], axes: tuple[str, ...]
) -> Segment:
    """What this chip holds of a layer's first `length` positions."""
    start = stretch_start(cache, axes)
    mine = jnp.clip(length - start, 0, cache.time)
    return dataclasses.replace(cache.segment(layer, mine), start=jnp.broadcast_to(start, length.shape))


def write_token(
    cache: KVCache,
    layer: int | jax.Array,
    k: Float[Array, "batch 1 kv_heads qkv"],
    v: Float[Array, "batch 1 kv_heads qkv"],
    position: Int[Array, " batch"],
    axes: tuple[str, ...],
) -> KVCache:
    """This chip's part with each row's new key and value, where their position is in it."""
    index = position - stretch_start(cache, axes)
    # An index beyond the end is dropped, a negative one would count from the end.
    index = jnp.where((index >= 0) & (index < cache.time), index, cache.time)
    return cache.write(layer, k, v, index)


def attend_time_sharded_cache(
    q: Float[Array, "batch time heads qkv"],
    segment: Segment,
    q_positions: Int[Array, "batch time"],
    axes: tuple[str, ...],
    *,
    window: int | jax.Array | None = None,
    cap: float | None = None,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> Float[Array, "batch time heads qkv"]:
    """Attention over the keys of all chips of the axes, the same on all; see `attention.attend`."""
    (q,) = vary_alike(axes, q)  # the same on all chips until it meets their keys
    return attend(q, [segment], q_positions, window=window, cap=cap, blocks=blocks, axes=axes)
