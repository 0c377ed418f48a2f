"""Softmax attention of queries over one or more segments of keys, in base 2.

`attend` walks blocks of queries and of keys with an online softmax, so that no time × time array exists
and blocks that no query needs are skipped; `attend_reference` forms all scores at once and is its slow
twin. q arrives with the softmax scale and log2(e) folded in (with a soft cap, with the scale alone: the
cap works on natural scores, and log2(e) follows it).

Semantics: key at absolute position j is visible to the query at position i when j ≤ i, j is within its
segment's valid length, and i − j < window where the layer has one (a window counts the query's own key).
Query head h uses kv head h // (heads / kv_heads). A row that sees no key gives zero. Keys and values
beyond a segment's length never reach an output, NaN or not.

A segment may hold one row for all rows of queries (shared_prefix.py): its keys are read once and not
repeated, and its blocks are skipped where no row sees any.

Data flow: q [batch, time, heads, qkv] → [batch, kv_heads, group·time, qkv] rows, so that a kv head's
queries share one matmul → running (max, sum, output) over key blocks → [batch, time, heads, qkv].

Worked example: scores (0, 1) in base 2 weigh 2⁰ : 2¹, so the output is v0/3 + 2·v1/3.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layers.kv_cache import KeyBlock, Segment
from layers.numerics import LOG2_E, softcap


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """Sizes of the blocks, in tokens: they bound memory and change nothing else."""

    queries: int = 256
    keys: int = 512

    @classmethod
    def on(cls, platform: str) -> "AttentionBlocks":
        """What suits a platform.

        A CPU multiplies small blocks as fast as large ones, and follows a text's length more closely with
        them: it reads, masks and multiplies a block whole. (SmolLM2-135M, a prompt of 256 tokens, 512
        positions: 413 tokens/s with blocks of 128 × 128, 362 with 256 × 512, medians of 7 in one run.)
        """
        return cls(128, 128) if platform == "cpu" else cls()


@flax.struct.dataclass
class _Running:
    """Online softmax of [batch, kv_heads, rows] queries: maximum, sum of weights, weighted values."""

    peak: jax.Array
    total: jax.Array
    output: jax.Array


def _visible(
    segment: Segment,
    places: Int[Array, " keys"],
    q_positions: Int[Array, "batch time"],
    window: int | jax.Array | None,
) -> jax.Array:
    """Which of the keys at these places of a segment each query sees, `[batch, time, keys]`."""
    key_positions = segment.start[:, None, None] + places[None, None, :]
    distance = q_positions[:, :, None] - key_positions
    visible = (distance >= 0) & (places[None, None, :] < segment.length[:, None, None])
    return visible if window is None else visible & (distance < window)


def _scores(q_rows: jax.Array, k: jax.Array, cap: float | None, scale: jax.Array | None = None) -> jax.Array:
    """Base-2 scores `[batch, kv_heads, rows, keys]` in float32; `scale` is that of int8 keys."""
    scores = _rows_with_keys("bkrd,{}ksd->bkrs", q_rows, k.astype(q_rows.dtype))
    if scale is not None:
        scores = scores * scale[:, :, None, :]
    return scores if cap is None else softcap(scores, cap) * LOG2_E


def _rows_with_keys(equation: str, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """An einsum of rows and keys or values, whose batch is the rows' or one for all that is not repeated."""
    if keys.shape[0] == rows.shape[0]:
        return jnp.einsum(equation.format("b"), rows, keys, preferred_element_type=jnp.float32)
    return jnp.einsum(equation.format(""), rows, keys[0], preferred_element_type=jnp.float32)


def _fold_rows(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, time, heads, qkv] → [batch, kv_heads, group·time, qkv], time fastest."""
    batch, time, heads, qkv = q.shape
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, qkv)
    return grouped.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, qkv)


def _unfold_rows(rows: jax.Array, time: int) -> jax.Array:
    """The inverse of `_fold_rows`."""
    batch, kv_heads, _, qkv = rows.shape
    grouped = rows.reshape(batch, kv_heads, -1, time, qkv)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(batch, time, -1, qkv)


def _row_mask(visible: jax.Array, group: int) -> jax.Array:
    """[batch, time, keys] → [batch, 1, group·time, keys]."""
    batch, time, keys = visible.shape
    shape = (batch, 1, group, time, keys)
    return jnp.broadcast_to(visible[:, None, None], shape).reshape(batch, 1, group * time, keys)


def _valid_values(v: jax.Array, segment: Segment, places: Int[Array, " keys"]) -> jax.Array:
    """v `[batch, kv_heads, keys, …]` with zero beyond the valid length, so that 0 · NaN cannot arise."""
    length = segment.length if segment.row is None else jnp.max(segment.length, keepdims=True)
    valid = places[None, :] < length[:, None]
    valid = valid.reshape(valid.shape[0], 1, -1, *(1,) * (v.ndim - 3))
    return jnp.where(valid, v, jnp.zeros_like(v))


def _read_block(segment: Segment, first: int | jax.Array, size: int) -> KeyBlock:
    """A block whose values are zero beyond the valid length, and its keys as scores need them."""
    places = segment.places(first, size)
    stored = segment.block(first, size)
    v, v_scale = (
        None if leaf is None else _valid_values(leaf, segment, places) for leaf in (stored.v, stored.v_scale)
    )
    k = segment.stretched(_keys(stored.k, segment, places), places)
    return KeyBlock(k, v, stored.k_scale, v_scale)


def _keys(k: jax.Array, segment: Segment, places: Int[Array, " keys"]) -> jax.Array:
    """k as it is: scores beyond the valid length are masked.

    On a CPU with a select on its way into the matmul: without one XLA writes the new token of a one-row cache
    twice, once for the matmul's sake, which is four copies of a layer's keys in each step.
    """
    return jax.lax.platform_dependent(k, cpu=lambda k: _valid_values(k, segment, places), default=lambda k: k)


def _weighted_values(weights: jax.Array, block: KeyBlock, dtype: jnp.dtype) -> jax.Array:
    """Float32 Σ weight · value, `[batch, kv_heads, rows, qkv]`; int8 values are scaled by their weights."""
    if block.v_scale is not None:
        weights = weights * block.v_scale[:, :, None, :]
    return _rows_with_keys("bkrs,{}ksd->bkrd", weights.astype(dtype), block.v.astype(dtype))


def attend_reference(
    q: Float[Array, "batch time heads qkv"],
    segments: Sequence[Segment],
    q_positions: Int[Array, "batch time"],
    *,
    window: int | jax.Array | None = None,
    cap: float | None = None,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> Float[Array, "batch time heads qkv"]:
    """All scores at once; the slow twin of `attend`, whose arguments it takes (blocks have no effect)."""
    del blocks
    kv_heads = segments[0].k.shape[-3]
    rows = _fold_rows(q, kv_heads)
    scores, values = [], []
    for segment in segments:
        block = _read_block(segment, 0, segment.keys)
        seen = _visible(segment, segment.places(0, segment.keys), q_positions, window)
        mask = _row_mask(seen, q.shape[2] // kv_heads)
        scores.append(jnp.where(mask, _scores(rows, block.k, cap, block.k_scale), -jnp.inf))
        values.append(block)
    score = jnp.concatenate(scores, axis=-1)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weights = jnp.exp2(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    parts = jnp.split(weights, np.cumsum([segment.keys for segment in segments])[:-1], axis=-1)
    float32 = jnp.dtype(jnp.float32)
    output = sum(_weighted_values(part, block, float32) for part, block in zip(parts, values, strict=True))
    return _unfold_rows(output / jnp.where(total > 0, total, 1.0), q.shape[1]).astype(q.dtype)


def _absorb(
    running: _Running,
    rows: jax.Array,
    segment: Segment,
    q_positions: jax.Array,
    block: tuple[int | jax.Array, int],
    *,
    window: int | jax.Array | None,
    cap: float | None,
) -> _Running:
    """Adds one block of keys to the running softmax; `block` is its first index and its size.

    The last block of a segment is moved back to fit inside it; what it would count twice is masked.
    """
    first, size = block
    placed = jnp.minimum(first, segment.keys - size)
    stored = _read_block(segment, placed, size)
    new = placed + jnp.arange(size, dtype=jnp.int32) >= first
    seen = _visible(segment, segment.places(placed, size), q_positions, window) & new[None, None, :]
    mask = _row_mask(seen, rows.shape[2] // q_positions.shape[1])
    scores = jnp.where(mask, _scores(rows, stored.k, cap, stored.k_scale), -jnp.inf)
    peak = jnp.maximum(running.peak, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isfinite(peak), peak, 0.0)  # rows that have seen nothing yet stay at −inf
    weights = jnp.exp2(scores - base[..., None])
    fade = jnp.exp2(running.peak - base)
    value_dtype = rows.dtype if stored.v_scale is not None else stored.v.dtype
    output = _weighted_values(weights, stored, value_dtype)
    return _Running(
        peak=peak,
        total=running.total * fade + jnp.sum(weights, axis=-1),
        output=running.output * fade[..., None] + output,
    )


def _needed_blocks(
    segment: Segment, q_positions: jax.Array, window: int | jax.Array | None, size: int
) -> tuple[jax.Array, jax.Array]:
    """Block range [low, high) outside which no query of the batch sees a key of the segment."""
    last = jnp.minimum(segment.length, jnp.max(q_positions, axis=1) - segment.start + 1)
    high = (jnp.max(segment.held(last)) + size - 1) // size
    if window is None:
        return jnp.zeros_like(high), high
    first = jnp.min(q_positions, axis=1) - segment.start - window + 1
    return segment.held(jnp.maximum(jnp.min(first), 0)) // size, high


def _attend_rows(
    q: jax.Array,
    segments: Sequence[Segment],
    q_positions: jax.Array,
    *,
    window: int | jax.Array | None,
    cap: float | None,
    keys_per_block: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """Attention of one block of queries, walking the key blocks of every segment."""
    kv_heads = segments[0].k.shape[-3]
    rows = _fold_rows(q, kv_heads)
    nothing = jnp.full_like(rows[..., 0], -jnp.inf, dtype=jnp.float32)
    running = _Running(nothing, jnp.zeros_like(nothing), jnp.zeros_like(rows, dtype=jnp.float32))
    for segment in segments:
        size = min(keys_per_block, segment.keys)

        def step(i: jax.Array, carry: _Running, segment: Segment = segment, size: int = size) -> _Running:
            return _absorb(carry, rows, segment, q_positions, (i * size, size), window=window, cap=cap)

        if size == segment.keys and segment.row is None:  # one block: straight code, differentiable
            running = step(jnp.zeros((), jnp.int32), running)
        else:
            low, high = _needed_blocks(segment, q_positions, window, size)
            running = jax.lax.fori_loop(low, high, step, running)
    running = _over_chips(running, axes)
    output = running.output / jnp.where(running.total > 0, running.total, 1.0)[..., None]
    return _unfold_rows(output, q.shape[1]).astype(q.dtype)


def _over_chips(running: _Running, axes: tuple[str, ...]) -> _Running:
    """One softmax over the keys of all chips of the axes, in two small all-reduces; itself over no axes."""
    if not axes:
        return running
    peak = jax.lax.pmax(running.peak, axes)
    fade = jnp.exp2(running.peak - jnp.where(jnp.isfinite(peak), peak, 0.0))[..., None]
    sums = jnp.concatenate([running.output, running.total[..., None]], axis=-1) * fade
    sums = jax.lax.psum(sums, axes)
    return _Running(peak, sums[..., -1], sums[..., :-1])


@jax.named_scope("attention")
def attend(
    q: Float[Array, "batch time heads qkv"],
    segments: Sequence[Segment],
    q_positions: Int[Array, "batch time"],
    *,
    window: int | jax.Array | None = None,
    cap: float | None = None,
    blocks: AttentionBlocks = AttentionBlocks(),
    axes: tuple[str, ...] = (),
) -> Float[Array, "batch time heads qkv"]:
    """Attention of q over the keys of all segments, memory bounded by the block sizes.

    q carries the folded softmax scale (see the module's docstring); positions are int32 and absolute.
    The sums run in float32; the result has q's dtype. Where the keys are spread over mesh axes, `axes`, each
    chip passes its own and all get the same result, by two all-reduces (see `striped_cache`).
    """
    batch, time, heads, qkv = q.shape
    options = {"window": window, "cap": cap, "keys_per_block": blocks.keys, "axes": axes}
    if time <= blocks.queries:
        return _attend_rows(q, segments, q_positions, **options)
    count = -(-time // blocks.queries)
    padding = count * blocks.queries - time
    # Padded queries repeat the last position, which widens no block range; their output is dropped.
    padded = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    padded = jnp.moveaxis(padded.reshape(batch, count, blocks.queries, heads, qkv), 1, 0)
    at = jnp.pad(q_positions, ((0, 0), (0, padding)), mode="edge")
    at = jnp.moveaxis(at.reshape(batch, count, blocks.queries), 1, 0)
    out = jax.lax.map(lambda args: _attend_rows(args[0], segments, args[1], **options), (padded, at))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, qkv)[:, :time]
