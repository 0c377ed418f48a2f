"""`flash_mha`: attention under plain `jit`, whatever the sharding of its arrays.

The compiler asks how the call is to be partitioned; `flash_placement` answers, and what each chip runs is
the walk of `ring_passes`: alone for batch and heads, round the ring for time. The Shardy rule says which
dims belong together, and the call has two forms, forward and gradients, since a custom partitioning has no
derivative of its own; nor has it a batching rule, so a vmapped dim is folded into the batch.

With more head shards than kv heads a chip keeps k and v whole and takes the kv heads of its own query
heads; their gradients are summed over the chips that share them.

Data flow: q, k, v → custom_vjp → custom_vmap → custom_partitioning → a chip's walk → output, log-sum-exp.

Worked example: q [2, 4096, 8, 64] with NamedSharding P("x", ("y", "z")) on 2,2,2, k and v with the same:
two rings of 4 chips, each with a batch row, 1,024 tokens a chip, 3 hops.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int

from layers.attention_blocks import PADDING, Keys, OutputGradient, Queries, output_gradient
from layers.flash_placement import FlashPlacement, FlashShapes, place, spec_axes
from layers.ring_attention import (
    AttentionForm,
    TokenPlaces,
    default_places,
    require_groups,
    vary_alike,
    walked_arc,
)
from layers.ring_passes import RingConfig, ring_gradients, ring_output

_Results = tuple[jax.Array, ...]
_Operation = Callable[..., tuple[jax.Array, ...]]


class _Arrays(NamedTuple):
    """The operands of both forms."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segments: jax.Array
    k_segments: jax.Array


def flash_mha(
    q: Float[Array, "batch time heads qkv"],
    k: Float[Array, "batch keys kv_heads qkv"],
    v: Float[Array, "batch keys kv_heads qkv"],
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    soft_cap: float | None = None,
    q_segments: Int[Array, "batch time"] | None = None,
    k_segments: Int[Array, "batch keys"] | None = None,
    key_lengths: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch time heads qkv"]:
    """Attention under plain `jit`, in `shard_map`, under `vmap` and `grad`; q's dtype.

    Args:
      q, k, v: sharded over batch, time and heads in any way; see `flash_placement`.
      softmax_scale: 1/√qkv unless given.
      is_causal: aligned at the end: query i sees keys up to i + keys − time.
      window_size: (left, right) inclusive, −1 for no bound.
      soft_cap: cap·tanh(score/cap).
      q_segments, k_segments: int32; a query sees keys of its own segment, −1 is padding.
      key_lengths: int32, valid keys of each row.

    Raises:
      ValueError: the width is sharded, or heads are no multiple of kv_heads.
    """
    form = AttentionForm(softmax_scale, is_causal, window_size, soft_cap)
    segments = (q_segments, k_segments, key_lengths)
    return flash_mha_with_lse(q, k, v, form, *segments)[0]


def flash_mha_with_lse(
    q: Float[Array, "batch time heads qkv"],
    k: Float[Array, "batch keys kv_heads qkv"],
    v: Float[Array, "batch keys kv_heads qkv"],
    form: AttentionForm = AttentionForm(),
    q_segments: Int[Array, "batch time"] | None = None,
    k_segments: Int[Array, "batch keys"] | None = None,
    key_lengths: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch time heads qkv"], Float32[Array, "batch time heads"]]:
    """`flash_mha` and its natural log-sum-exp `[batch, time, heads]`; the kernel is part of the form."""
    require_groups(q.shape[2], k.shape[2])
    q_segments = jnp.zeros(q.shape[:2], jnp.int32) if q_segments is None else q_segments
    k_segments = jnp.zeros(k.shape[:2], jnp.int32) if k_segments is None else k_segments
    if key_lengths is not None:
        beyond = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] >= key_lengths[:, None]
        k_segments = jnp.where(beyond, PADDING, k_segments)
    return _flash(form, *vary_alike((), q, k, v, q_segments, k_segments))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(form: AttentionForm, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    output, lse = _operation(form, _FORWARD)(*arrays)
    return output, lse


def _flash_forward(form: AttentionForm, *arrays: jax.Array) -> tuple[_Results, _Results]:
    output, lse = _flash(form, *arrays)
    return (output, lse), (*arrays, output, lse)


def _flash_backward(
    form: AttentionForm, saved: _Results, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    *arrays, output, lse = saved
    gradient = output_gradient(output, lse, *cotangents)
    rows = (gradient.d_output, gradient.lse, gradient.delta)
    return *_operation(form, _BACKWARD)(*arrays, *rows), None, None


_flash.defvjp(_flash_forward, _flash_backward)


class _Direction(NamedTuple):
    """One of the two forms: what a chip runs, its Shardy rule, and which arrays its results lie like."""

    run: _Operation
    rule: str
    results: tuple[str, ...]


class _Chip(NamedTuple):
    """Where a chip stands: no placement for arrays that are whole."""

    form: AttentionForm
    placement: FlashPlacement = FlashPlacement((), (), (), (), ())
    axes_in_order: tuple[str, ...] | None = None

    def step(self, arrays: _Arrays) -> tuple[RingConfig, Queries, Keys, jax.Array]:
        """The arguments of a walk of this chip's arrays."""
        placement, form = self.placement, self.form
        places = TokenPlaces(q_segments=arrays.q_segments, k_segments=arrays.k_segments)
        if placement.time and not placement.keys:
            time, keys = arrays.q.shape[1], arrays.k.shape[1]
            first = keys - time * lax.axis_size(placement.time) + time * lax.axis_index(placement.time)
            positions = first + jnp.arange(time, dtype=jnp.int32)[None, :]
            places = places._replace(q_positions=jnp.broadcast_to(positions, arrays.q.shape[:2]))
        located = default_places(arrays.q.shape, arrays.k.shape, placement.keys, form.order, places)
        arc = walked_arc(arrays.q.shape[1], arrays.k.shape[1], placement.keys, form, places)
        scores = form.scores(arrays.q.shape[3])
        config = RingConfig(placement.keys, arc, scores, form.kernel, self.axes_in_order)
        return config, Queries(arrays.q, located[0]), Keys(arrays.k, arrays.v, located[1]), form.bounds

    def own_heads(self, arrays: _Arrays, heads: int) -> jax.Array | None:
        """Index of the kv head of each of this chip's query heads, where k and v are whole."""
        if not self.placement.heads or self.placement.kv_heads:
            return None
        local = arrays.q.shape[2]
        mine = lax.axis_index(self.placement.heads) * local + jnp.arange(local, dtype=jnp.int32)
        return mine // (heads // arrays.k.shape[2])


def _run_forward(chip: _Chip, heads: int, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of this chip's queries; `heads` is their number on all chips."""
    arrays = _Arrays(*operands)
    own = chip.own_heads(arrays, heads)
    if own is not None:
        arrays = arrays._replace(k=jnp.take(arrays.k, own, axis=2), v=jnp.take(arrays.v, own, axis=2))
    done = ring_output(*chip.step(arrays))
    return done.output.astype(arrays.q.dtype), done.lse


def _run_backward(chip: _Chip, heads: int, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """dq, dk, dv of this chip's arrays."""
    arrays, gradient = _Arrays(*operands[:5]), OutputGradient(*operands[5:])
    own, k, v = chip.own_heads(arrays, heads), arrays.k, arrays.v
    if own is not None:
        arrays = arrays._replace(k=jnp.take(k, own, axis=2), v=jnp.take(v, own, axis=2))
    dq, dk, dv = ring_gradients(*chip.step(arrays), gradient)
    if own is not None:
        dk, dv = (jnp.zeros(k.shape, jnp.float32).at[:, :, own].add(x) for x in (dk, dv))
    if chip.placement.summed:
        dk, dv = lax.psum((dk, dv), chip.placement.summed)
    return dq.astype(arrays.q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_FORWARD = _Direction(_run_forward, "b t h d, b s n d, b s n d, b t, b s -> b t h d, b t h", ("q", "row"))
_BACKWARD = _Direction(
    _run_backward,
    "b t h d, b s n d, b s n d, b t, b s, b t h d, b t h, b t h -> b t h d, b s n d, b s n d",
    ("q", "k", "k"),
)
_OPERANDS = ("q", "k", "k", "q_segments", "k_segments", "q", "row", "row")


def _specs(placement: FlashPlacement) -> dict[str, P]:
    """Specs of each kind of array."""
    batch, time, keys, heads, kv_heads = (
        axes or None
        for axes in (placement.batch, placement.time, placement.keys, placement.heads, placement.kv_heads)
    )
    return {
        "q": P(batch, time, heads, None),
        "k": P(batch, keys, kv_heads, None),
        "q_segments": P(batch, time),
        "k_segments": P(batch, keys),
        "row": P(batch, time, heads),
    }


@functools.cache
def _operation(form: AttentionForm, direction: _Direction) -> _Operation:
    """One form as a function that can be partitioned and vmapped."""

    def partition(
        mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct], _: object
    ) -> tuple[Mesh, _Operation, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        q, k, v = arguments[:3]
        shapes = FlashShapes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        q_spec, *kv_specs = (spec_axes(tuple(x.sharding.spec)) for x in (q, k, v))
        placement = place(q_spec, kv_specs, shapes, mesh.shape)
        shardings = {name: NamedSharding(mesh, spec) for name, spec in _specs(placement).items()}
        chip = _Chip(form, placement, tuple(mesh.axis_names))

        def lower(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return direction.run(chip, shapes.heads, *operands)

        results = tuple(shardings[name] for name in direction.results)
        return mesh, lower, results, tuple(shardings[name] for name in _OPERANDS[: len(arguments)])

    @custom_partitioning
    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return direction.run(_Chip(form), operands[0].shape[2], *operands)

    whole.def_partition(partition=partition, sharding_rule=direction.rule, need_replication_factors=("d",))
    return _foldable(whole)


def _foldable(operation: _Operation) -> _Operation:
    """An operation whose vmapped dim becomes part of the batch, any number of times."""

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return operation(*operands)

    @call.def_vmap
    def fold(
        size: int, batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        whole = [
            x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, is_batched in zip(operands, batched, strict=True)
        ]
        results = call(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        unfolded = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
        return unfolded, (True,) * len(unfolded)

    return call
