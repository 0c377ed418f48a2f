"""Choose each slot's next token from logits whose vocabulary may be sharded.

A request's token depends on its logits, its row of the state, its seed, its sample's number and its
position — not on its slot, on the other slots or on how many chips share the vocabulary. The noise is drawn
per (request, position, global token id), so that a shard draws exactly its own part of it.

Order: penalties, logit bias, temperature, top-k, top-p, min-p; then a draw from what is left: the largest
scaled logit + Gumbel noise wins, computed as the largest weight / exponential noise, its exponential, which
costs a logarithm less (−log of standard exponential noise is standard Gumbel). temperature 0 takes the
arg-max without noise. Ties go to the lowest id.

Work that no active slot needs is skipped. Where every sampling slot cuts its distribution short, the cut and
the noise are first tried on each shard's `CANDIDATES` most likely tokens; if some slot's cut lies further
down, they are done over the whole shard. Both give the same token.

Data flow: logits [slots, vocab_shard] → penalties and bias → `Columns` → `Cut` → noise → token, log-prob.

Worked example: logits [1, 3, 2], temperature 0.5, top_k 2. Scaled: [2, 6, 4]; top-k leaves ids 1 and 2; id 1
is drawn with probability 1/(1 + e^−2) = 0.88. The log-probability reported for it is the model's own,
3 − log(e + e³ + e²) = −0.41.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Int32, Key

from inference_engine.sampling_state import SamplingState
from inference_engine.truncation import (
    Columns,
    Cut,
    Truncation,
    inside,
    mass,
    no_cut,
    order_key,
    truncate,
    words,
)
from inference_engine.vocab_shard import VocabShard, anywhere, local_index, vocab_max, vocab_min, vocab_sum

CANDIDATES = 256
"""Most likely tokens of a shard that are looked at before the whole shard is."""

NO_TOKEN = -1
"""Stands for a token where a slot's logits allow none: NaN, +inf, or nothing that is not banned."""


@flax.struct.dataclass
class Sampled:
    """What `sample` chose.

    Attributes:
      tokens: int32 [slots]; `NO_TOKEN` where the logits were unusable, which the engine reports.
      logprobs: float32 [slots], the token's log-probability under the model's own distribution, before
        penalties, bias and temperature; NaN with `NO_TOKEN`.
    """

    tokens: jax.Array
    logprobs: jax.Array


@flax.struct.dataclass
class _Draw:
    """What drawing from any columns needs beside them; one entry a slot.

    `keys` seed the noise, `sampling` says which slots draw at all, `total` is the mass of the vocabulary.
    """

    state: SamplingState
    keys: jax.Array
    sampling: jax.Array
    total: jax.Array


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "slots vocab"],
    state: SamplingState,
    positions: Int[Array, " slots"],
    active: Bool[Array, " slots"],
    shard: VocabShard,
) -> Sampled:
    """One token for each slot.

    Args:
      logits: this shard's, of any float dtype.
      state: rows of the same slots and the same vocabulary shard.
      positions: absolute position of each slot's new token, which seeds its noise.
      active: slots in use; the others get their arg-max and cause no work.
      shard: where this chip's logits stand in the vocabulary.
    """
    own = _own_logits(logits, shard)
    normaliser = _log_normaliser(own, shard)
    adjusted = _one_zero(_penalised(own, state, active, shard))
    peak = vocab_max(adjusted, shard)
    usable = jnp.isfinite(normaliser) & jnp.isfinite(peak)
    sampling = active & usable & (state.temperature > 0)
    tokens = lax.cond(
        anywhere(sampling, shard),
        lambda: _sampled(adjusted, state, positions, sampling, peak, shard),
        lambda: _lowest_id(adjusted, shard.ids.reshape(1, -1), peak, shard),
    )
    logprobs = jnp.where(usable, _value_at(own, tokens, shard) - normaliser, jnp.nan)
    return Sampled(jnp.where(usable, tokens, NO_TOKEN), logprobs)


@jax.named_scope("sampling")
def top_logprobs(
    logits: Float[Array, "slots vocab"], shard: VocabShard, n: int
) -> tuple[Float[Array, "slots n"], Int32[Array, "slots n"]]:
    """The n most likely tokens under the model's own distribution: log-probabilities and ids.

    Most likely first, ties by lowest id; n is at most the vocabulary. n values a shard and slot travel.
    """
    own = _own_logits(logits, shard)
    normaliser = _log_normaliser(own, shard)
    values, columns = lax.top_k(own, min(n, own.shape[1]))
    ids = shard.ids[columns]
    values, ids = _from_all_shards(values, shard), _from_all_shards(ids, shard)
    best, columns = lax.top_k(values, n)
    return best - normaliser.reshape(-1, 1), jnp.take_along_axis(ids, columns, axis=1)


def token_logprobs(
    logits: Float[Array, "slots vocab"], tokens: Int[Array, " slots"], shard: VocabShard
) -> Float[Array, " slots"]:
    """Each row's log-probability of its token under the model's own distribution.

    NaN where the logits are not usable, as in `sample`; two numbers a row travel.
    """
    own = _own_logits(logits, shard)
    normaliser = _log_normaliser(own, shard)
    return jnp.where(jnp.isfinite(normaliser), _value_at(own, tokens, shard) - normaliser, jnp.nan)


def _own_logits(logits: Float[Array, "slots vocab"], shard: VocabShard) -> Float[Array, "slots vocab"]:
    """The model's logits in float32, −inf in the vocabulary's padding."""
    return _one_zero(jnp.where(shard.ids.reshape(1, -1) < shard.size, logits.astype(jnp.float32), -jnp.inf))


def _one_zero(logits: Float[Array, "slots vocab"]) -> Float[Array, "slots vocab"]:
    """The same values with 0 for −0, so that both tie also where bits or `lax.top_k` compare them."""
    return jnp.where(logits == 0, 0.0, logits)


def _log_normaliser(own: Float[Array, "slots vocab"], shard: VocabShard) -> Float[Array, " slots"]:
    """log Σ exp(logit); not finite exactly where a logit is NaN or +inf, or all are −inf.

    A maximum over chips may lose a NaN, the sum of exponentials does not.
    """
    peak = vocab_max(own, shard)
    return peak + jnp.log(vocab_sum(jnp.exp(own - peak.reshape(-1, 1)), shard))


def _value_at(
    values: Float[Array, "slots vocab"], tokens: Int[Array, " slots"], shard: VocabShard
) -> Float[Array, " slots"]:
    """Each slot's value at its token, from the shard that holds it."""
    column, held = local_index(tokens, shard)
    value = jnp.take_along_axis(values, column.reshape(-1, 1), axis=1)[:, 0]
    return lax.psum(jnp.where(held, value, 0.0), shard.axes)


def _penalised(
    own: Float[Array, "slots vocab"], state: SamplingState, active: Bool[Array, " slots"], shard: VocabShard
) -> Float[Array, "slots vocab"]:
    """Logits after the penalties and the bias of each slot.

    Repetition (CTRL, Keskar et al., 2019, section 4.1, in the form for logits of either sign): tokens of
    prompt or output, positive logits divided, others multiplied. Presence and frequency: tokens of the
    output alone, subtracted.
    """

    def penalties() -> Float[Array, "slots vocab"]:
        counts = state.output_counts
        penalty = state.repetition.reshape(-1, 1)
        repeated = jnp.where(own > 0, own / penalty, own * penalty)
        values = jnp.where(state.prompt_mask | (counts > 0), repeated, own)
        presence = jnp.where(counts > 0, state.presence.reshape(-1, 1), 0.0)
        return values - presence - state.frequency.reshape(-1, 1) * counts.astype(jnp.float32)

    off = (state.repetition == 1) & (state.presence == 0) & (state.frequency == 0)
    values = lax.cond(anywhere(active & ~off, shard), penalties, lambda: own)
    return lax.cond(anywhere(active & state.biased, shard), lambda: values + state.logit_bias, lambda: values)


def _lowest_id(
    scores: Float[Array, "slots columns"],
    ids: Int[Array, "rows columns"],
    best: Float[Array, " slots"],
    shard: VocabShard,
) -> Int[Array, " slots"]:
    """Lowest id over the vocabulary whose score is `best`."""
    return vocab_min(jnp.where(scores == best.reshape(-1, 1), ids, 2**31 - 1), shard)


def _sampled(
    adjusted: Float[Array, "slots vocab"],
    state: SamplingState,
    positions: Int[Array, " slots"],
    sampling: Bool[Array, " slots"],
    peak: Float[Array, " slots"],
    shard: VocabShard,
) -> Int[Array, " slots"]:
    """Tokens of all slots where some of them sample; arg-max for the rest."""
    temperature = jnp.where(sampling, state.temperature, 1.0)
    everything = _columns(adjusted, shard.ids.reshape(1, -1), peak, temperature)
    total = mass(words(everything, no_cut(sampling), shard), shard)
    draw = _Draw(state, slot_keys(state, positions), sampling, total)
    if adjusted.shape[1] <= CANDIDATES:
        return _drawn(everything, draw, shard)[0]
    # The k most likely tokens are among the candidates; where another cut falls shows once it is made.
    limited, shortened = state.top_k > 0, (state.top_p < 1) | (state.min_p > 0)
    hopeful = jnp.where(limited, state.top_k <= CANDIDATES, shortened)

    def from_candidates() -> tuple[Int[Array, " slots"], Bool[Array, ""]]:
        values, columns = lax.top_k(adjusted, CANDIDATES)
        candidates = _columns(values, shard.ids[columns], peak, temperature)
        tokens, cut = _drawn(candidates, draw, shard)
        last_key = lax.pmax(candidates.key[:, -1], shard.axes)
        last_weight = lax.pmax(candidates.weight[:, -1], shard.axes)
        beyond = ~limited & (last_key >= cut.key) & (last_weight >= state.min_p)
        return tokens, ~anywhere(sampling & beyond, shard)

    def nothing() -> tuple[Int[Array, " slots"], Bool[Array, ""]]:
        return jnp.where(sampling, NO_TOKEN, NO_TOKEN), ~anywhere(sampling, shard)

    tokens, found = lax.cond(~anywhere(sampling & ~hopeful, shard), from_candidates, nothing)
    return lax.cond(found, lambda: tokens, lambda: _drawn(everything, draw, shard)[0])


def _columns(
    logits: Float[Array, "slots columns"],
    ids: Int[Array, "rows columns"],
    peak: Float[Array, " slots"],
    temperature: Float[Array, " slots"],
) -> Columns:
    """Columns with order and weight; the peak is subtracted first, so that tiny temperatures stay finite."""
    weight = jnp.exp((logits - peak.reshape(-1, 1)) / temperature.reshape(-1, 1))
    return Columns(logits, ids, order_key(logits), weight)


def _drawn(columns: Columns, draw: _Draw, shard: VocabShard) -> tuple[Int[Array, " slots"], Cut]:
    """Draw a token of these columns for each slot; also the cut that top-k and top-p came to."""
    state = draw.state
    cut = truncate(columns, Truncation(state.top_k, state.top_p, draw.sampling), draw.total, shard)
    kept = inside(cut, columns) & (columns.weight >= state.min_p.reshape(-1, 1))
    race = columns.weight / exponential_noise(draw.keys, columns.ids)
    drawn = jnp.where(kept, race, 0.0)
    scores = jnp.where(draw.sampling.reshape(-1, 1), drawn, columns.logits)
    return _lowest_id(scores, columns.ids, vocab_max(scores, shard), shard), cut


def slot_keys(state: SamplingState, positions: Int[Array, " slots"]) -> Key[Array, " slots"]:
    """Each slot's key at a position: the seed's words, the sample's number and the position folded in."""
    places = jnp.stack([state.sample_index, positions], axis=1).astype(jnp.uint32)
    folded = jnp.concatenate([state.seed, places], axis=1)
    keys = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), folded.shape[:1])
    for word in range(folded.shape[1]):
        keys = jax.vmap(jax.random.fold_in)(keys, folded[:, word])
    return keys


def exponential_noise(
    keys: Key[Array, " slots"], ids: Int[Array, "rows columns"]
) -> Float[Array, "slots columns"]:
    """Standard exponential noise of each token id; rows is slots, or 1 for the same ids in all slots.

    Both words of a token's hash make one uniform v in (0, 1), as fine near 0 as float32 is, and the noise is
    −log(1 − v): above 0, so that no token is out of reach, and of full resolution where tokens are won.
    """
    rows = jnp.broadcast_to(ids, (keys.shape[0], ids.shape[1]))
    hashes = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys, rows)
    high_low = jax.random.key_data(hashes).astype(jnp.float32)
    v = high_low[..., 0] * 2.0**-32 + (high_low[..., 1] + 0.5) * 2.0**-64
    noise = -jnp.log1p(-jnp.minimum(v, 1 - 2.0**-24))
    # Fused into the maximum that follows, hash and logarithm would be evaluated one by one on a CPU.
    return lax.optimization_barrier(noise)


def _from_all_shards(values: Array, shard: VocabShard) -> Array:
    """[slots, n] of every shard side by side in the shards' order, the same on all of them.

    A sum of blocks that are zero but for one: unlike an all-gather it is known to be replicated.
    """
    if not shard.axes:
        return values
    shards, mine = lax.axis_size(shard.axes), lax.axis_index(shard.axes)
    blocks = jnp.where(jnp.arange(shards).reshape(1, -1, 1) == mine, values[:, None, :], 0)
    return lax.psum(blocks, shard.axes).reshape(values.shape[0], -1)
