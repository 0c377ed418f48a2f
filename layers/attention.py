"""Softmax attention of queries over one or more segments of keys, in base 2.

`attend` walks blocks of queries and of keys with an online softmax, so that no time × time array exists
and blocks that no query needs are skipped; `attend_reference` forms all scores at once and is its slow
twin. q arrives with the softmax scale and log2(e) folded in (with a soft cap, with the scale alone: the
cap works on natural scores, and log2(e) follows it).

Semantics: key at absolute position j is visible to the query at position i when j ≤ i, j is within its
segment's valid length, and i − j < window where the layer has one (a window counts the query's own key).
Query head h uses kv head h // (heads / kv_heads). A row that sees no key gives zero. Keys and values
beyond a segment's length never reach an output, NaN or not.

Data flow: q [batch, time, heads, qkv] → [batch, kv_heads, group·time, qkv] rows, so that a kv head's
queries share one matmul → running (max, sum, output) over key blocks → [batch, time, heads, qkv].

Worked example: scores (0, 1) in base 2 weigh 2⁰ : 2¹, so the output is v0/3 + 2·v1/3.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from layers.kv_cache import Segment
from layers.numerics import LOG2_E, softcap


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """Sizes of the blocks, in tokens: they bound memory and change nothing else."""

    queries: int = 256
    keys: int = 512


@flax.struct.dataclass
class _Running:
    """Online softmax of [batch, kv_heads, rows] queries: maximum, sum of weights, weighted values."""

    peak: jax.Array
    total: jax.Array
    output: jax.Array


def _visible(
    segment: Segment,
    indices: Int[Array, " keys"],
    q_positions: Int[Array, "batch time"],
    window: int | jax.Array | None,
) -> jax.Array:
    """Which keys of a segment each query sees, `[batch, time, keys]`."""
    key_positions = segment.start[:, None, None] + indices[None, None, :]
    distance = q_positions[:, :, None] - key_positions
    visible = (distance >= 0) & (indices[None, None, :] < segment.length[:, None, None])
    return visible if window is None else visible & (distance < window)


def _scores(q_rows: jax.Array, k: jax.Array, cap: float | None) -> jax.Array:
    """Base-2 scores `[batch, kv_heads, rows, keys]` in float32."""
    scores = jnp.einsum("bkrd,bksd->bkrs", q_rows, k.astype(q_rows.dtype), preferred_element_type=jnp.float32)
    return scores if cap is None else softcap(scores, cap) * LOG2_E


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


def _valid_values(v: jax.Array, segment: Segment, indices: Int[Array, " keys"]) -> jax.Array:
    """v with what lies beyond the valid length set to zero, so that 0 · NaN cannot arise."""
    valid = indices[None, :] < segment.length[:, None]
    return jnp.where(valid[:, None, :, None], v, jnp.zeros_like(v))


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
        k, v = segment.block(0, segment.keys)
        indices = jnp.arange(segment.keys, dtype=jnp.int32)
        mask = _row_mask(_visible(segment, indices, q_positions, window), q.shape[2] // kv_heads)
        scores.append(jnp.where(mask, _scores(rows, k, cap), -jnp.inf))
        values.append(_valid_values(v, segment, indices))
    score, v = jnp.concatenate(scores, axis=-1), jnp.concatenate(values, axis=-2)
    peak = jnp.max(score, axis=-1, keepdims=True)
    weights = jnp.exp2(score - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    output = jnp.einsum("bkrs,bksd->bkrd", weights, v.astype(jnp.float32))
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
    k, v = segment.block(placed, size)
    indices = placed + jnp.arange(size, dtype=jnp.int32)
    # Scores are masked anyway. Without a select on k's way into the matmul, XLA on a CPU writes the new
    # token of a one-row cache twice, once for the matmul's sake: four copies of a layer's keys in each step.
    k = _valid_values(k, segment, indices)
    seen = _visible(segment, indices, q_positions, window) & (indices >= first)[None, None, :]
    mask = _row_mask(seen, rows.shape[2] // q_positions.shape[1])
    scores = jnp.where(mask, _scores(rows, k, cap), -jnp.inf)
    peak = jnp.maximum(running.peak, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isfinite(peak), peak, 0.0)  # rows that have seen nothing yet stay at −inf
    weights = jnp.exp2(scores - base[..., None])
    fade = jnp.exp2(running.peak - base)
    values = _valid_values(v, segment, indices)
    output = jnp.einsum(
        "bkrs,bksd->bkrd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
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
    high = (jnp.max(last) + size - 1) // size
    if window is None:
        return jnp.zeros_like(high), high
    first = jnp.min(q_positions, axis=1) - segment.start - window + 1
    return jnp.maximum(jnp.min(first), 0) // size, high


def _attend_rows(
    q: jax.Array,
    segments: Sequence[Segment],
    q_positions: jax.Array,
    *,
    window: int | jax.Array | None,
    cap: float | None,
    keys_per_block: int,
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

        if size == segment.keys:  # one block: straight code, differentiable
            running = step(jnp.zeros((), jnp.int32), running)
        else:
            low, high = _needed_blocks(segment, q_positions, window, size)
            running = jax.lax.fori_loop(low, high, step, running)
    output = running.output / jnp.where(running.total > 0, running.total, 1.0)[..., None]
    return _unfold_rows(output, q.shape[1]).astype(q.dtype)


@jax.named_scope("attention")
def attend(
    q: Float[Array, "batch time heads qkv"],
    segments: Sequence[Segment],
    q_positions: Int[Array, "batch time"],
    *,
    window: int | jax.Array | None = None,
    cap: float | None = None,
    blocks: AttentionBlocks = AttentionBlocks(),
) -> Float[Array, "batch time heads qkv"]:
    """Attention of q over the keys of all segments, memory bounded by the block sizes.

    q carries the folded softmax scale (see the module's docstring); positions are int32 and absolute.
    The sums run in float32; the result has q's dtype.
    """
    batch, time, heads, qkv = q.shape
    options = {"window": window, "cap": cap, "keys_per_block": blocks.keys}
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
