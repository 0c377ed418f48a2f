"""Attention of one block of queries over one block of keys: what a ring does at each step.

A `BlockKernel` computes it forward and backward; which one is an argument wherever blocks are used. This
module has the terms that they share and the reference form, which holds all scores of a block at once.

Every token has a place, int32 `[batch, 2, tokens]`: row 0 its position in the text, row 1 its segment. A
query sees a key of the same segment whose position is at most `left` before and `right` after its own.
Segment −1 is padding, which sees nothing and is seen by nothing. Scores are natural (base e): scale · q·k,
then the soft cap. Query head h uses kv head h // (heads / kv_heads).

Keys and values that no query of a block sees are set to zero first, since 0 · NaN is NaN; likewise queries
and output gradients of padding.

Data flow, forward: scores s [batch, kv_heads, time, group, keys] → weights e^(s − lse) → output, lse.
Backward, from the saved lse and delta = Σ output·d_output (less d_lse): ds = w · (d_output·v − delta).

Worked example: scores (0, log 3) with values (1, 5) give lse = log 4 and output ¼·1 + ¾·5 = 4.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from layers.numerics import softcap
from layers.softmax_merge import Partial, is_empty, merge

POSITION, SEGMENT = 0, 1
PADDING = -1


@dataclasses.dataclass(frozen=True)
class ScoreForm:
    """How a score comes from q·k: times `scale`, then cap·tanh(s/cap) where there is a cap."""

    scale: float
    cap: float | None = None


@flax.struct.dataclass
class Keys:
    """Keys with what goes with them: k, v `[batch, keys, kv_heads, qkv]`, places `[batch, 2, keys]`."""

    k: jax.Array
    v: jax.Array
    places: jax.Array


@flax.struct.dataclass
class Queries:
    """q `[batch, time, heads, qkv]`, places `[batch, 2, time]`."""

    q: jax.Array
    places: jax.Array


@flax.struct.dataclass
class OutputGradient:
    """What the backward pass of a row needs besides its inputs.

    Attributes:
      d_output: `[batch, time, heads, qkv]`.
      lse: `[batch, time, heads]` float32 over all keys, −inf where no key is seen.
      delta: `[batch, time, heads]` float32, Σ output·d_output − d_lse.
    """

    d_output: jax.Array
    lse: jax.Array
    delta: jax.Array


def output_gradient(
    output: jax.Array, lse: jax.Array, d_output: jax.Array, d_lse: jax.Array
) -> OutputGradient:
    """From a forward pass and the gradients of its two results."""
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), axis=-1) - d_lse
    return OutputGradient(d_output, lse, jnp.where(is_empty(lse), 0.0, delta))


Bounds = Int[Array, "2"]
"""How far a query sees to the left and to the right, inclusive; see `ring_schedule.Reach`."""

Gradients = tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]
"""dq, dk, dv in float32, of the shapes of q, k, v."""


@flax.struct.dataclass
class Block:
    """One step's inputs: queries, the keys that are here now, and how far a query sees."""

    queries: Queries
    keys: Keys
    bounds: jax.Array


@runtime_checkable
class BlockKernel(Protocol):
    """Attention over one block of keys; hashable, so that it can be a static argument.

    What has been summed so far goes in and out, so that a kernel can work in place.
    """

    def forward(self, block: Block, form: ScoreForm, running: Partial) -> Partial:
        """Output and log-sum-exp over the keys seen so far and these."""

    def backward(
        self, block: Block, form: ScoreForm, gradient: OutputGradient, dq: Float[Array, "..."]
    ) -> Gradients:
        """dq with this block's share added, and dk and dv as far as these queries go."""


def visible(
    q_places: Int[Array, "batch 2 time"], k_places: Int[Array, "batch 2 keys"], bounds: Bounds
) -> Bool[Array, "batch time keys"]:
    """Which keys each query sees."""
    distance = q_places[:, POSITION, :, None] - k_places[:, POSITION, None, :]
    segment = k_places[:, SEGMENT, None, :]
    same = (q_places[:, SEGMENT, :, None] == segment) & (segment != PADDING)
    return same & (distance <= bounds[0]) & (-distance <= bounds[1])


def without_padding(
    places: Int[Array, "batch 2 time"], x: Float[Array, "batch time heads *qkv"]
) -> jax.Array:
    """x with zero where the token is padding."""
    real = places[:, SEGMENT] != PADDING
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x))


def seen_alone(x: Float[Array, "batch keys kv_heads qkv"], mask: Bool[Array, "batch time keys"]) -> jax.Array:
    """Keys or values with zero where no query sees them."""
    return jnp.where(jnp.any(mask, axis=1)[:, :, None, None], x, jnp.zeros_like(x))


def by_kv_head(x: Float[Array, "batch time heads *qkv"], kv_heads: int) -> jax.Array:
    """[batch, time, heads, …] → [batch, kv_heads, time, group, …]: a kv head's rows lie together."""
    return jnp.swapaxes(x.reshape(x.shape[:2] + (kv_heads, -1) + x.shape[3:]), 1, 2)


def by_token(x: Float[Array, "batch kv_heads time group *qkv"]) -> jax.Array:
    """The inverse of `by_kv_head`."""
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(x.shape[:2] + (-1,) + x.shape[4:])


def row_mask(mask: Bool[Array, "batch time keys"]) -> Bool[Array, "batch 1 time 1 keys"]:
    """The mask beside scores."""
    return mask[:, None, :, None, :]


def block_scores(
    q: Float[Array, "batch kv_heads time group qkv"],
    k: Float[Array, "batch keys kv_heads qkv"],
    form: ScoreForm,
) -> tuple[jax.Array, jax.Array | float]:
    """Scores `[batch, kv_heads, time, group, keys]` in float32, and d score / d (q·k)."""
    scores = softcap(product("bktgd,bskd->bktgs", q, k) * form.scale, form.cap)
    slope = form.scale if form.cap is None else form.scale * (1 - jnp.square(scores / form.cap))
    return scores, slope


def normalised(output: jax.Array, total: jax.Array, base: jax.Array) -> Partial:
    """From sums over keys of e^(score − base) and of values weighed with it, a kv head's rows together."""
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, base + jnp.log(safe), -jnp.inf)
    return Partial(by_token(output / safe[..., None]), by_token(lse))


def nothing_seen(q: Float[Array, "batch time heads qkv"]) -> Partial:
    """What attention to no key is."""
    nothing = jnp.zeros_like(q, dtype=jnp.float32)
    return Partial(nothing, nothing[..., 0] - jnp.inf)


def block_gradients(block: Block, form: ScoreForm, gradient: OutputGradient) -> Gradients:
    """dq, dk, dv of one block, with all its scores at once."""
    queries, keys = block.queries, block.keys
    kv_heads = keys.k.shape[2]
    mask = visible(queries.places, keys.places, block.bounds)
    k, v = seen_alone(keys.k, mask), seen_alone(keys.v, mask)
    q = by_kv_head(without_padding(queries.places, queries.q), kv_heads)
    d_output = by_kv_head(without_padding(queries.places, gradient.d_output), kv_heads).astype(v.dtype)
    scores, slope = block_scores(q, k, form)
    lse = jnp.where(is_empty(gradient.lse), 0.0, gradient.lse)
    lse, delta = (by_kv_head(row, kv_heads)[..., None] for row in (lse, gradient.delta))
    weights = jnp.where(row_mask(mask), jnp.exp(scores - lse), 0.0)
    dv = product("bktgs,bktgd->bskd", weights.astype(v.dtype), d_output)
    d_weights = product("bktgd,bskd->bktgs", d_output, v)
    # Where a row sees nothing delta may be anything.
    d_scores = jnp.where(row_mask(mask), weights * (d_weights - delta) * slope, 0.0).astype(k.dtype)
    dq = product("bktgs,bskd->bktgd", d_scores, k)
    return by_token(dq), product("bktgs,bktgd->bskd", d_scores, q), dv


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum that accumulates in float32 and stays there."""
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class ReferenceBlocks:
    """All scores of a block at once: the slow twin of every other kernel."""

    def forward(self, block: Block, form: ScoreForm, running: Partial) -> Partial:
        """See `BlockKernel.forward`."""
        queries, keys = block.queries, block.keys
        mask = visible(queries.places, keys.places, block.bounds)
        k, v = seen_alone(keys.k, mask), seen_alone(keys.v, mask)
        q = by_kv_head(without_padding(queries.places, queries.q), k.shape[2])
        scores = jnp.where(row_mask(mask), block_scores(q, k, form)[0], -jnp.inf)
        peak = jnp.max(scores, axis=-1)
        base = jnp.where(is_empty(peak), 0.0, peak)
        weights = jnp.exp(scores - base[..., None])
        total = jnp.sum(weights, axis=-1)
        output = product("bktgs,bskd->bktgd", weights.astype(v.dtype), v)
        return merge(running, normalised(output, total, base))

    def backward(
        self, block: Block, form: ScoreForm, gradient: OutputGradient, dq: Float[Array, "..."]
    ) -> Gradients:
        """See `BlockKernel.backward`."""
        part, dk, dv = block_gradients(block, form, gradient)
        return dq + part, dk, dv
