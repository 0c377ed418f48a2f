"""Attention over a text that is spread over the chips of a ring, inside `shard_map`, forward and backward.

Queries stay where they are. Keys, values and their places travel round the ring; each step's block of
attention is merged into the running one in float32. The backward pass starts from the saved log-sum-exp: k,
v travel once more, each block's gradients are computed once, and dk, dv travel with the keys that they
belong to, then home. Only the arc of the ring that a window needs is walked, and within a step the kernel
skips what no query sees. Grouped-query heads are never repeated, not on the wire either.

Semantics: with T queries and S keys in all, causal is aligned at the end (query i sees keys up to i + S −
T); a window (left, right) is inclusive, −1 for no bound; query head h uses kv head h // (heads / kv_heads);
a query that sees no key gives zero and log-sum-exp −inf; log-sum-exps are natural. NaN in padding, beyond
the length or in segments that no query is in reaches nothing; what causality or a window hides has to be
finite.

Data flow, per step: hop(k, v, places) beside kernel(q, k, v) → merge → output, lse.

Worked example: 16 tokens on 4 chips. Chip 2 has queries 8–11; it meets keys 8–11, 4–7, 0–3 and 12–15, of
which the last are skipped under a causal mask. With window (3, 0) the ring stops after one hop.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from layers.attention_blocks import (
    PADDING,
    Block,
    BlockKernel,
    Keys,
    OutputGradient,
    Queries,
    ScoreForm,
    nothing_seen,
)
from layers.attention_walk import XlaBlocks
from layers.collectives.ring import AxisName, Index, Ring, axis_names
from layers.ring_schedule import Arc, Reach, TokenOrder, chip_spans, needed_arc, piece_length
from layers.softmax_merge import Partial, is_empty


@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """What attention computes and by which kernel, apart from its arrays.

    Attributes:
      softmax_scale: of the scores; None for 1/√qkv.
      is_causal: a query sees no later key.
      window_size: (left, right) inclusive, −1 for no bound.
      soft_cap: cap·tanh(score/cap), on natural scores.
      order: how the text lies on the chips, where places are not given.
      kernel: what computes a block.
    """

    softmax_scale: float | None = None
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    soft_cap: float | None = None
    order: TokenOrder = TokenOrder.CONTIGUOUS
    kernel: BlockKernel = XlaBlocks()

    @property
    def reach(self) -> Reach:
        """Mask and window as one."""
        return Reach.of(self.is_causal, self.window_size)

    def scores(self, qkv: int) -> ScoreForm:
        """How scores are formed."""
        scale = 1 / math.sqrt(qkv) if self.softmax_scale is None else self.softmax_scale
        return ScoreForm(scale, self.soft_cap)


class TokenPlaces(NamedTuple):
    """What is known of this chip's tokens; None stands for: in order, one segment, all valid.

    Attributes:
      q_positions, k_positions: int32 `[batch, time]`, `[batch, keys]`, global, below 2²⁹.
      q_segments, k_segments: likewise; −1 is padding.
      key_lengths: int32 `[batch]`, valid keys of the whole text, those at positions below it.
      bounds: int32 `[2]`, mask and window as numbers of the program instead of the form's; see `Reach`.
    """

    q_positions: jax.Array | None = None
    k_positions: jax.Array | None = None
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    key_lengths: jax.Array | None = None
    bounds: jax.Array | None = None


_KeyGradients = tuple[jax.Array, jax.Array]
Travelling = TypeVar("Travelling", Keys, _KeyGradients)


class _Config(NamedTuple):
    """The static part of a ring."""

    axis_name: AxisName
    arc: Arc
    scores: ScoreForm
    kernel: BlockKernel


def ring_attention(
    q: Float[Array, "batch time heads qkv"],
    k: Float[Array, "batch keys kv_heads qkv"],
    v: Float[Array, "batch keys kv_heads qkv"],
    axis_name: AxisName,
    form: AttentionForm = AttentionForm(),
    places: TokenPlaces = TokenPlaces(),
) -> Float[Array, "batch time heads qkv"]:
    """Attention of this chip's queries over the keys of all chips of the axes; q's dtype.

    Args:
      q, k, v: this chip's tokens; all chips hold equally many.
      axis_name: one mesh axis, a tuple of them (the first is the major one) or () for no ring.
      form: what is computed.
      places: where the tokens stand.

    Raises:
      ValueError: heads are no multiple of kv_heads, or a zigzag text is odd.
    """
    return ring_attention_with_lse(q, k, v, axis_name, form, places)[0]


def ring_attention_with_lse(
    q: Float[Array, "batch time heads qkv"],
    k: Float[Array, "batch keys kv_heads qkv"],
    v: Float[Array, "batch keys kv_heads qkv"],
    axis_name: AxisName,
    form: AttentionForm = AttentionForm(),
    places: TokenPlaces = TokenPlaces(),
) -> tuple[Float[Array, "batch time heads qkv"], Float32[Array, "batch time heads"]]:
    """`ring_attention` and its natural log-sum-exp, −inf where a query sees no key; both have gradients."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} kv heads; allowed: a multiple of {kv_heads}")
    reach, bounds = form.reach, places.bounds
    if bounds is None:
        bounds = jnp.asarray([reach.left, reach.right], jnp.int32)
    q_places, k_places = _default_places(q.shape, k.shape, axis_name, form.order, places)
    arc = _arc(q.shape[1], k.shape[1], axis_name, form, places)
    config = _Config(axis_name, arc, form.scores(q.shape[3]), form.kernel)
    return _ring(config, *_vary_alike(axis_name, q, k, v, q_places, k_places, bounds))


def _default_places(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    axis_name: AxisName,
    order: TokenOrder,
    places: TokenPlaces,
) -> tuple[Int[Array, "batch 2 time"], Int[Array, "batch 2 keys"]]:
    """Position and segment of every token of this chip."""
    chips = lax.axis_size(axis_names(axis_name))
    first = (k_shape[1] - q_shape[1]) * chips  # causal is aligned at the end
    q_at, k_at = places.q_positions, places.k_positions
    q_at = first + chip_positions(q_shape[1], axis_name, order)[None] if q_at is None else q_at
    k_at = chip_positions(k_shape[1], axis_name, order)[None] if k_at is None else k_at
    return (
        _places(q_shape[:2], q_at, places.q_segments),
        _places(k_shape[:2], k_at, places.k_segments, places.key_lengths),
    )


def _places(
    shape: tuple[int, ...], positions: jax.Array, segments: jax.Array | None, lengths: jax.Array | None = None
) -> Int[Array, "batch 2 tokens"]:
    """Positions and segments as one array, what lies beyond the lengths as padding."""
    positions = jnp.broadcast_to(positions, shape)
    segments = jnp.zeros_like(positions) if segments is None else segments
    if lengths is not None:
        segments = jnp.where(positions < lengths[:, None], segments, PADDING)
    return jnp.stack([positions, segments], axis=1)


def chip_positions(length: int, axis_name: AxisName, order: TokenOrder) -> Int[Array, " time"]:
    """Positions of this chip's `length` tokens in a text that starts at 0."""
    names = axis_names(axis_name)
    chips = lax.axis_size(names)
    index = lax.axis_index(names) if names else jnp.zeros((), jnp.int32)
    place = jnp.arange(length, dtype=jnp.int32)
    if order is TokenOrder.CONTIGUOUS:
        return index * length + place
    piece = piece_length(length * chips, chips)
    return jnp.where(place < piece, index, 2 * chips - 2 - index) * piece + place


def _arc(q_length: int, k_length: int, axis_name: AxisName, form: AttentionForm, places: TokenPlaces) -> Arc:
    """The chunks to walk: all of them unless positions and reach are known beforehand."""
    chips = lax.axis_size(axis_names(axis_name))
    if any(given is not None for given in (places.q_positions, places.k_positions, places.bounds)):
        return Arc(0, chips)
    queries = chip_spans(form.order, q_length * chips, chips, (k_length - q_length) * chips)
    return needed_arc(queries, chip_spans(form.order, k_length * chips, chips), form.reach)


def _vary_alike(axis_name: AxisName, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, all varying over the ring and over every axis that one of them varies over."""
    axes = frozenset(axis_names(axis_name)).union(*(_varying(array) for array in arrays))
    missing = (tuple(sorted(axes - _varying(array))) for array in arrays)
    return tuple(
        lax.pcast(array, names, to="varying") if names else array
        for array, names in zip(arrays, missing, strict=True)
    )


def _varying(array: jax.Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    config: _Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_places: jax.Array,
    k_places: jax.Array,
    bounds: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Output in q's dtype, and log-sum-exp."""
    ring, arc = Ring.over(config.axis_name, max_unrolled=0), config.arc

    def absorb(running: Partial, keys: Keys) -> Partial:
        return config.kernel.forward(Block(Queries(q, q_places), keys, bounds), config.scores, running)

    def step(_: Index, carry: tuple[Partial, Keys]) -> tuple[Partial, Keys]:
        running, keys = carry
        return absorb(running, keys), _hop(ring, keys, 1)

    running = nothing_seen(q)
    if arc.count:
        carry = (running, _hop(ring, Keys(k, v, k_places), arc.start))
        running = absorb(*ring.run(step, carry, 0, arc.count - 1))
    return running.output.astype(q.dtype), running.lse


def _ring_forward(config: _Config, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    output, lse = _ring(config, *arrays)
    return (output, lse), (*arrays, output, lse)


def _ring_backward(
    config: _Config, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    """dq, dk, dv; no gradient for places and bounds."""
    q, k, v, q_places, k_places, bounds, output, lse = saved
    d_output, d_lse = cotangents
    ring, arc = Ring.over(config.axis_name, max_unrolled=0), config.arc
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), axis=-1) - d_lse
    gradient = OutputGradient(d_output, lse, jnp.where(is_empty(lse), 0.0, delta))

    def share(dq: jax.Array, keys: Keys) -> tuple[jax.Array, _KeyGradients]:
        block = Block(Queries(q, q_places), keys, bounds)
        dq, dk, dv = config.kernel.backward(block, config.scores, gradient, dq)
        return dq, (dk, dv)

    def add(dq: jax.Array, travelling: _KeyGradients, keys: Keys) -> tuple[jax.Array, _KeyGradients]:
        """One block; its dk and dv join those that have come this far with the keys."""
        arrived = _hop(ring, travelling, 1)
        dq, kv = share(dq, keys)
        return dq, jax.tree.map(jnp.add, arrived, kv)

    def step(_: Index, carry: tuple[jax.Array, _KeyGradients, Keys]) -> tuple[jax.Array, _KeyGradients, Keys]:
        dq, travelling, keys = carry
        return *add(dq, travelling, keys), _hop(ring, keys, 1)

    if not arc.count:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), None, None, None
    keys = _hop(ring, Keys(k, v, k_places), arc.start)
    dq, travelling = share(jnp.zeros_like(q, dtype=jnp.float32), keys)
    if arc.count > 1:
        carry = (dq, travelling, _hop(ring, keys, 1))
        dq, travelling = add(*ring.run(step, carry, 1, arc.count - 1))
    dk, dv = _hop(ring, travelling, -(arc.start + arc.count - 1))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


def _hop(ring: Ring, tree: Travelling, places: int) -> Travelling:
    """All leaves moved on by so many places, none for a whole turn."""
    places %= ring.size
    return jax.tree.map(lambda x: ring.hop(x, places), tree) if places else tree


_ring.defvjp(_ring_forward, _ring_backward)
