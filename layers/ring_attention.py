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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from layers.attention_blocks import PADDING, BlockKernel, Keys, Queries, ScoreForm, output_gradient
from layers.attention_walk import XlaBlocks
from layers.collectives.ring import AxisName, axis_names
from layers.ring_passes import RingConfig, ring_gradients, ring_output
from layers.ring_schedule import Arc, Reach, TokenOrder, chip_spans, needed_arc, piece_length


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

    @property
    def bounds(self) -> Int[Array, "2"]:
        """The reach as numbers of a program; by operations, as a partitioned call may hold no constant."""
        return jnp.where(jnp.arange(2) == 0, self.reach.left, self.reach.right).astype(jnp.int32)

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
    require_groups(q.shape[2], k.shape[2])
    bounds = form.bounds if places.bounds is None else places.bounds
    q_places, k_places = default_places(q.shape, k.shape, axis_name, form.order, places)
    arc = walked_arc(q.shape[1], k.shape[1], axis_name, form, places)
    config = RingConfig(axis_name, arc, form.scores(q.shape[3]), form.kernel)
    return _ring(config, *vary_alike(axis_name, q, k, v, q_places, k_places, bounds))


def require_groups(heads: int, kv_heads: int) -> None:
    """Refuse query heads that do not share out over the kv heads."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} kv heads; allowed: a multiple of {kv_heads}")


def default_places(
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


def walked_arc(
    q_length: int, k_length: int, axis_name: AxisName, form: AttentionForm, places: TokenPlaces
) -> Arc:
    """The chunks to walk: all of them unless positions and reach are known beforehand."""
    chips = lax.axis_size(axis_names(axis_name))
    if any(given is not None for given in (places.q_positions, places.k_positions, places.bounds)):
        return Arc(0, chips)
    queries = chip_spans(form.order, q_length * chips, chips, (k_length - q_length) * chips)
    return needed_arc(queries, chip_spans(form.order, k_length * chips, chips), form.reach)


def vary_alike(axis_name: AxisName, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, all varying over the ring and over every axis that one of them varies over."""
    axes = frozenset(axis_names(axis_name)).union(*(varying_axes(array) for array in arrays))
    missing = (tuple(sorted(axes - varying_axes(array))) for array in arrays)
    return tuple(
        lax.pcast(array, names, to="varying") if names else array
        for array, names in zip(arrays, missing, strict=True)
    )


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The mesh axes over which an array may differ."""
    return jax.typeof(array).manual_axis_type.varying


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(config: RingConfig, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output in q's dtype, and log-sum-exp; arrays are q, k, v, their places and the bounds."""
    q, k, v, q_places, k_places, bounds = arrays
    done = ring_output(config, Queries(q, q_places), Keys(k, v, k_places), bounds)
    return done.output.astype(q.dtype), done.lse


def _ring_forward(
    config: RingConfig, *arrays: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    output, lse = _ring(config, *arrays)
    return (output, lse), (*arrays, output, lse)


def _ring_backward(
    config: RingConfig, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    """dq, dk, dv; no gradient for places and bounds."""
    q, k, v, q_places, k_places, bounds, output, lse = saved
    gradient = output_gradient(output, lse, *cotangents)
    dq, dk, dv = ring_gradients(config, Queries(q, q_places), Keys(k, v, k_places), bounds, gradient)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_ring.defvjp(_ring_forward, _ring_backward)
