"""Top-k and top-p without sorting: the shortest run of most likely tokens, found by bisection.

Tokens are ordered by (logit descending, id ascending). Both options keep the shortest prefix of that order
which reaches a target: a count of k for top-k, a share p of the probability mass for top-p. The last token
of the prefix is a `Cut`. It is found by bisecting, first on the 32 bits of the order-preserving integer
image of the logit, then, where several tokens share that very logit, on their id. Each step is one
reduction over the vocabulary shard and one `psum` of a few numbers a slot; nothing is sorted or gathered.

Mass is counted in integers. A token's weight exp((logit − max)/temperature) is rounded to a multiple of
2^−2b (b = 15 bits for vocabularies below 65,536, 13 for 256,128) and summed as two words of b bits, which
no order of summation changes: every mesh cuts at the same token. Weights below half a unit count as none.

Data flow: `order_key(logits)` and weights → `truncate` → `inside(cut)` → mask.

Worked example: logits [1, 3, 3, 2] and top-k 2. 3 or more is reached by two tokens, so the cut is logit 3
with id 2. With top-k 1 two tokens tie at 3 and the second bisection stops at id 1. With top-p 0.5 and
temperature 1 the weights are [0.14, 1, 1, 0.37], target 0.5 · 2.5: ids 1 and 2.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int32, UInt32

from inference_engine.vocab_shard import VocabShard, anywhere, vocab_sum

_BITS_ALONE, _BITS_ON_MESH = 1, 2
"""Bits settled by one step: one is least arithmetic, two are half the collectives."""

_LOWEST_KEY = -(2**31)
_HIGHEST_ID = 2**31 - 1


@flax.struct.dataclass
class Columns:
    """Some columns of the logits: a whole vocabulary shard or candidates out of it.

    Attributes:
      logits: float32 [slots, columns], penalised and biased, without −0; −inf for padding and banned tokens.
      ids: int32 [1 or slots, columns].
      key: int32 [slots, columns], `order_key(logits)`.
      weight: float32 [slots, columns], exp((logit − max) / temperature), in [0, 1].
    """

    logits: jax.Array
    ids: jax.Array
    key: jax.Array
    weight: jax.Array


@flax.struct.dataclass
class Truncation:
    """What each slot asks for, one entry a slot.

    Attributes:
      top_k: int32, below 1 for off.
      top_p: float32, 1 for off.
      wanted: bool, whether the slot samples at all; the others are not cut.
    """

    top_k: jax.Array
    top_p: jax.Array
    wanted: jax.Array


@flax.struct.dataclass
class Cut:
    """The last token that is kept, int32 [slots] each; see `inside`."""

    key: jax.Array
    last_id: jax.Array


def order_key(logits: Float[Array, "slots columns"]) -> Int32[Array, "slots columns"]:
    """Integers in the order of float32 values; −0 is below 0, NaN is undefined."""
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def inside(cut: Cut, columns: Columns) -> Bool[Array, "slots columns"]:
    """Whether each token is at or before the cut."""
    key, last = cut.key.reshape(-1, 1), cut.last_id.reshape(-1, 1)
    return (columns.key > key) | ((columns.key == key) & (columns.ids <= last))


def truncate(columns: Columns, options: Truncation, total: Float[Array, " slots"], shard: VocabShard) -> Cut:
    """The cut of top-k, then of top-p within what it left.

    `total` is the `mass` of the whole vocabulary, of which the columns may be a part. A k at or above the
    vocabulary keeps everything.
    """
    limited, shortened = options.top_k > 0, options.top_p < 1

    def stage(i: Int[Array, ""], kept: Cut) -> Cut:
        by_mass = i == 1
        wanted = options.wanted & jnp.where(by_mass, shortened, limited)

        def cut() -> Cut:
            weights = words(columns, kept, shard)
            share = options.top_p * jnp.where(limited, mass(weights, shard), total)
            target = jnp.where(by_mass, jnp.maximum(share, 1.0), options.top_k.astype(jnp.float32))
            target = jnp.where(wanted, target, 0.0)
            ones = jnp.array([0, 1], jnp.int32).reshape(1, 2, 1)
            found = _cut(columns, jnp.where(by_mass, weights, ones), target, shard)
            return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), found, kept)

        return lax.cond(anywhere(wanted, shard), cut, lambda: kept)

    return lax.fori_loop(0, 2, stage, no_cut(options.wanted))


def no_cut(like: Bool[Array, " slots"]) -> Cut:
    """The cut that keeps every token; varies over the same mesh axes as `like`."""
    return Cut(jnp.where(like, _LOWEST_KEY, _LOWEST_KEY), jnp.where(like, _HIGHEST_ID, _HIGHEST_ID))


def words(columns: Columns, kept: Cut, shard: VocabShard) -> Int32[Array, "slots two columns"]:
    """High and low b bits of each weight in units of 2^−2b; 0 for tokens outside `kept`."""
    bits = _word_bits(shard)
    scaled = jnp.round(columns.weight * 2.0 ** (2 * bits)).astype(jnp.int32)
    fixed = jnp.where(inside(kept, columns), scaled, 0)
    return jnp.stack([fixed >> bits, fixed & (2**bits - 1)], axis=1)


def mass(weights: Int32[Array, "*slots two columns"], shard: VocabShard) -> Float[Array, "*slots"]:
    """Exact sum over the vocabulary of weights given as two words, rounded once to float32."""
    bits = _word_bits(shard)
    sums = vocab_sum(weights, shard)
    high, low = sums[..., 0] + (sums[..., 1] >> bits), sums[..., 1] & (2**bits - 1)
    return high.astype(jnp.float32) * 2.0**bits + low.astype(jnp.float32)


def _word_bits(shard: VocabShard) -> int:
    """Bits b of each of a weight's two words: as many as let a sum over the vocabulary fit in int32."""
    return min(15, 31 - shard.size.bit_length())


def _cut(
    columns: Columns,
    weights: Int32[Array, "slots two columns"],
    target: Float[Array, " slots"],
    shard: VocabShard,
) -> Cut:
    """End of the shortest prefix of the tokens whose weights' mass reaches the target."""
    weights, goal = weights[:, None], target.reshape(-1, 1)
    key, ids = columns.key[:, None], columns.ids[:, None]

    def reached(mask: Bool[Array, "slots steps columns"]) -> Bool[Array, "slots steps"]:
        return mass(jnp.where(mask[:, :, None], weights, 0), shard) >= goal

    zero = jnp.where(target > 0, jnp.uint32(0), jnp.uint32(0))
    edge = _signed(_largest(32, lambda u: reached(key >= _signed(u)[:, :, None]), zero, shard))
    ties = vocab_sum((columns.key == edge.reshape(-1, 1)).astype(jnp.int32), shard)

    def last_id() -> Int32[Array, " slots"]:
        edge3 = edge.reshape(-1, 1, 1)

        def short(u: UInt32[Array, "slots steps"]) -> Bool[Array, "slots steps"]:
            before = ids < u.astype(jnp.int32)[:, :, None]
            return ~reached((key > edge3) | ((key == edge3) & before))

        return _largest(shard.size.bit_length(), short, zero, shard).astype(jnp.int32)

    return Cut(edge, lax.cond(anywhere(ties > 1, shard), last_id, lambda: no_cut(target > 0).last_id))


def _signed(u: UInt32[Array, "*slots"]) -> Int32[Array, "*slots"]:
    """The int32 at the same place in its order as `u` in that of uint32."""
    return lax.bitcast_convert_type(u ^ jnp.uint32(2**31), jnp.int32)


def _largest(
    bits: int,
    holds: Callable[[UInt32[Array, "slots steps"]], Bool[Array, "slots steps"]],
    zero: UInt32[Array, " slots"],
    shard: VocabShard,
) -> UInt32[Array, " slots"]:
    """Largest number below 2^bits for which `holds`, which is true up to it; 0 where it never is.

    `zero` gives the number of slots and the mesh axes that the result varies over.
    """
    step_bits = _BITS_ON_MESH if shard.axes else _BITS_ALONE
    passes = -(-bits // step_bits)
    digits = jnp.arange(1, 2**step_bits, dtype=jnp.uint32).reshape(1, -1)

    def settle(i: Int[Array, ""], prefix: UInt32[Array, " slots"]) -> UInt32[Array, " slots"]:
        shift = ((passes - 1 - i) * step_bits).astype(jnp.uint32)
        digit = jnp.sum(holds(prefix.reshape(-1, 1) | (digits << shift)), axis=-1, dtype=jnp.uint32)
        return prefix | (digit << shift)

    return lax.fori_loop(0, passes, settle, zero)
