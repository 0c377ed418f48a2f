"""Attention of a prompt's chunk whose tokens are dealt over chips, over keys that are dealt alike.

The cache goes round the ring in blocks of as many keys a chip as the chunk has tokens a chip: for each block
a walk of P steps, whose results are joined in float32. Only blocks that hold a key that some row sees are
walked, so that a prompt in chunks moves no key that it does not need, and no more than two blocks of keys
are alive. What is shared by rows is walked in the same way.

Data flow: segments → `ring_keys`, a block of each → `ring_passes.ring_output` → `softmax_merge.merge` →
output.

Worked example: 16,384 tokens on 8 chips in chunks of 4,096: a block is 512 keys a chip, and the third chunk
walks three blocks, 21 hops, and none of the fourth's.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from layers.attention_blocks import PADDING, BlockKernel, Keys, Queries, ScoreForm, nothing_seen
from layers.attention_walk import XlaBlocks
from layers.kv_cache import Segment
from layers.ring_attention import vary_alike, varying_axes
from layers.ring_passes import RingConfig, ring_output
from layers.ring_schedule import UNBOUNDED, Arc
from layers.softmax_merge import Partial, merge

LN_2 = math.log(2.0)


def attend_by_ring(
    q: Float[Array, "batch time heads qkv"],
    segments: Sequence[Segment],
    q_positions: Int[Array, "batch time"],
    axes: tuple[str, ...],
    *,
    window: int | jax.Array | None = None,
    cap: float | None = None,
    kernel: BlockKernel = XlaBlocks(),
) -> Float[Array, "batch time heads qkv"]:
    """`attention.attend` of this chip's queries over the keys of all chips of the axes."""
    config = RingConfig(axes, Arc(0, lax.axis_size(axes)), folded_scores(cap), kernel)
    bounds = window_bounds(window)
    q, q_positions = vary_alike(axes, q, q_positions, *jax.tree.leaves(segments))[:2]
    places = jnp.stack([q_positions, jnp.zeros_like(q_positions)], axis=1)
    running = nothing_seen(q)
    for segment in segments:
        size = min(q.shape[1], segment.keys)

        def absorb(i: jax.Array, running: Partial, segment: Segment = segment, size: int = size) -> Partial:
            keys = ring_keys(segment, i * size, size, q.dtype)
            inputs = vary_alike(axes, q, places, keys.k, keys.v, keys.places, bounds)
            part = ring_output(config, Queries(*inputs[:2]), Keys(*inputs[2:5]), inputs[5])
            return merge(running, part)

        low, high = _needed_blocks(segment, q_positions, window, size * config.arc.count)
        running = lax.fori_loop(low, high, absorb, running)
    return running.output.astype(q.dtype)


def folded_scores(cap: float | None) -> ScoreForm:
    """How scores follow from queries that carry log2(e), or with a cap do not; see `attention`."""
    return ScoreForm(LN_2 if cap is None else 1.0, cap)


def window_bounds(window: int | jax.Array | None) -> Int[Array, "2"]:
    """A causal window that counts a token's own key, as bounds of a ring."""
    left = UNBOUNDED if window is None else window - 1
    return jnp.stack([jnp.asarray(left, jnp.int32), jnp.zeros((), jnp.int32)])


def ring_keys(segment: Segment, first: int | jax.Array, size: int, dtype: jnp.dtype) -> Keys:
    """`size` keys of a segment from index `first`, as they travel: for every row, in `dtype`, with places.

    A block that ends beyond the segment is moved back inside it; what a block before it has is padding.
    """
    placed = jnp.minimum(first, segment.keys - size)
    block, places = segment.block(placed, size), segment.places(placed, size)
    new = placed + jnp.arange(size, dtype=jnp.int32) >= first
    real = (places[None, :] < segment.length[:, None]) & new[None, :]
    positions = segment.start[:, None] + places[None, :]
    k = segment.stretched(_scaled(block.k, block.k_scale), places)
    v = _scaled(block.v, block.v_scale)
    rows = len(segment.length)
    k, v = (jnp.broadcast_to(jnp.swapaxes(x, 1, 2).astype(dtype), _of_rows(x, rows)) for x in (k, v))
    return Keys(k, v, jnp.stack([positions, jnp.where(real, 0, PADDING)], axis=1))


def _scaled(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Keys or values `[rows, kv_heads, keys, qkv]` as numbers; int8 ones have scales without qkv."""
    return values if scale is None else values.astype(jnp.float32) * scale[..., None]


def _of_rows(x: jax.Array, rows: int) -> tuple[int, ...]:
    """[rows or 1, kv_heads, keys, qkv] → rows, keys, kv_heads, qkv."""
    _, kv_heads, keys, qkv = x.shape
    return rows, keys, kv_heads, qkv


def _needed_blocks(
    segment: Segment, q_positions: jax.Array, window: int | jax.Array | None, size: int
) -> tuple[jax.Array, jax.Array]:
    """The blocks [low, high) of `size` keys over all chips outside which no query of any chip sees a key.

    The same on all chips, since all of them have to walk as often.
    """
    longest = _everywhere(jax.lax.pmax, jnp.max(segment.length))
    high = (longest + size - 1) // size
    if window is None:
        return jnp.zeros_like(high), high
    first = _everywhere(jax.lax.pmin, jnp.min(jnp.min(q_positions, axis=1) - segment.start)) - window + 1
    return jnp.minimum(jnp.maximum(first, 0) // size, high), high


def _everywhere(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """A number reduced over the axes over which it differs."""
    axes = tuple(sorted(varying_axes(x)))
    return reduce(x, axes) if axes else x
