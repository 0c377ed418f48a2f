"""The check has power: each mistake planted in the mesh's code is reported, and nothing else is.

A mistake is a patch of one name in the code that only the mesh runs, so that one device stays right. The
models are small and synthetic, with grouped and multiquery heads, biases, a window and int8 kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from checkpoints.synthetic import synthetic_state
from inference_engine.checking.cases import Case
from inference_engine.checking.run import Checker, Row
from layers import (
    attention,
    attn_all_to_all,
    cache_insert,
    cache_ring,
    sharded_layer,
    transformer,
    weight_gathered,
)
from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveMode
from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.norm import scale_and_shift
from layers.ring_schedule import Arc
from layers.rope import rope_phases, unstretched
from layers.serial import stored_keys
from layers.sharded_layer import ShardedLayer
from layers.sharded_ops import local_part
from layers.shared_prefix import SharedPrefixes, attended
from layers.striped_cache import Striping, striping
from layers.transformer import MeshModel
from layers.weight_stationary import WeightStationary1D, WeightStationary2D
from tests.planted_cases import (
    BATCH_Z,
    BY_HEADS,
    CUBE,
    DEALT,
    DEALT_ANEW,
    GATHERED_INT8,
    GATHERED_XY,
    GROUPED,
    INT8,
    INT8_CACHE,
    LONG_PROMPT,
    MULTIQUERY,
    SERIAL,
    SHARED,
    TRADED,
    TWO_LAYOUTS,
    XPOS,
)

Where = tuple[HParams, Case]
Patch = tuple[Any, str, Callable[..., Any]]


@functools.cache
def checker(hparams: HParams) -> Checker:
    """One for each model, so that references are computed once."""
    return Checker(synthetic_state(hparams), CUBE, make_mesh(CUBE), longest=6, steps=4)


def outcome(where: Where) -> Row:
    """The row of a case."""
    hparams, case = where
    return checker(hparams).run(case)


_my_rows, _reduce_kv, _gather_rows = transformer.my_rows, sharded_layer.reduce_kv, sharded_layer.gather_rows
_step_tokens, _call, _in = MeshModel._step_tokens, ShardedLayer.__call__, ShardedLayer._in
_logits = MeshModel.logits
_put, _visit_in, _visit_out = (
    weight_gathered._Groups.put, weight_gathered._SumOfParts.visit, weight_gathered._PartsOfEmbed.visit
)  # fmt: skip
_gathered_out, _walk = weight_gathered.WeightGathered.project_out, weight_gathered.walk
_beside, _write_index = sharded_layer._beside, transformer.write_index
_moved, _overwrite = cache_insert._moved, cache_insert._overwrite
_embedding = WeightStationary2D.reduce_embedding


_attention_rows, _segments = MeshModel._attention_rows, SharedPrefixes.segments


def _step(change: Callable[[MeshModel, jax.Array, Any], Any]) -> Patch:
    """Changes what layers are told of the tokens; `change` gets the positions of all rows and times."""

    def changed(self: MeshModel, shape: tuple[int, ...], start: jax.Array) -> Any:
        step = _step_tokens(self, shape, start)
        first = jnp.broadcast_to(start, (shape[0],))
        positions = first[:, None] + jnp.arange(shape[1], dtype=jnp.int32)[None, :]
        return change(self, positions, step)

    return MeshModel, "_step_tokens", changed


def _input(change: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Changes weight and bias of the input projections."""

    def changed(self: ShardedLayer, n: jax.Array, weight: Any, bias: Any) -> jax.Array:
        return _in(self, n, *change(weight, bias))

    return ShardedLayer, "_in", changed


def _x_first(q: jax.Array, attention: Any) -> jax.Array:
    """Trades over x, then over y and z, instead of over all in one call."""
    traded = lax.all_to_all(q, "x", split_axis=0, concat_axis=2, tiled=True)
    traded = lax.all_to_all(traded, ("y", "z"), split_axis=0, concat_axis=2, tiled=True)
    return attn_all_to_all._regroup(traded, ("y", "z", "x"), ("x", "y", "z"))


def _local_norm(x: jax.Array, params: Any, kind: Any, eps: float, axes: tuple[str, ...]) -> jax.Array:
    """A norm over this chip's part alone."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    mine = jax.tree.map(lambda vector: local_part(vector, axes, 0), params)
    return scale_and_shift(wide * lax.rsqrt(square + eps), mine).astype(x.dtype)


def _one_plane_of_z(self: WeightStationary1D, h: Any, matrix: jax.Array, layer: Any) -> jax.Array:
    """The sum over y and z without the terms of half of the chips."""
    partial = matmul_reducescatter(jnp.concatenate(h, axis=-1)[0], matrix, "x", self.config, layer=layer)
    kept = jnp.where(lax.axis_index("z") == 0, partial, jnp.zeros_like(partial))
    return all_reduce(kept, ("y", "z"), "float32")


def _z_not_reduced(self: WeightStationary2D, h: Any, matrix: jax.Array, layer: Any) -> jax.Array:
    """Each chip of z keeps its own partial sum."""
    partial = allgather_matmul(jnp.concatenate(h, axis=-1)[0], matrix, "x", self.config, layer=layer)
    return local_part(reduce_scatter(partial, "y", "float32", dimension=2), ("z",), 2)


def _embed_zy(self: MeshModel, params: Any, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Vocabulary shards taken to be in (z, y) order."""
    table = params.embedding
    local = tokens - lax.axis_index(("z", "y")) * table.shape[0]
    held = (local >= 0) & (local < table.shape[0])
    rows = jnp.take(table, jnp.where(held, local, 0), axis=0).astype(dtype)
    return self.ops.reduce_embedding(jnp.where(held[:, :, None], rows, jnp.zeros_like(rows)))


def _other_y(self: MeshModel, params: Any, x: jax.Array, rows: int) -> jax.Array:
    """Logits of the vocabulary shard across y."""
    return lax.ppermute(_logits(self, params, x, rows), "y", [(0, 1), (1, 0)])


def _no_window(self: ShardedLayer, *args: Any, window: Any, **kwargs: Any) -> Any:
    del window
    return _call(self, *args, window=None, **kwargs)


def _ones(weight: Any) -> Any:
    return dataclasses.replace(weight, scale=jnp.ones_like(weight.scale))


def _rolled(weight: Any) -> Any:
    return dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=-2))


def _first_chunk(bias: Any) -> Any:
    return None if bias is None else jnp.broadcast_to(bias[..., :1, :], bias.shape)


def _next_group(self: Any, finished: Any, group: Any) -> None:
    _put(self, finished, (group + 1) % self.count)


def _next_part(self: Any, piece: jax.Array, index: Any, part: Any) -> jax.Array:
    return _visit_in(self, piece, (index + 1) % self.parts.shape[2], part)


def _next_embed(self: Any, piece: jax.Array, index: Any, part: Any) -> jax.Array:
    count = self.total.shape[2] // piece.shape[2]
    return _visit_out(self, piece, (index + 1) % count, part)


def _rest_not_reduced(self: Any, h: Any, matrix: jax.Array, layer: Any) -> jax.Array:
    """What this chip of z multiplied, without the others' terms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weight_gathered, "reduce_scatter", lambda x, axes, d, *, dimension: local_part(x, axes, 2)
        )
        return _gathered_out(self, h, matrix, layer)


def _wrong_way(shard: jax.Array, ring: Any, mode: Any, visit: Any) -> None:
    """Shards that come from behind taken for those from ahead; on an axis of 2 the two are one."""
    _walk(shard, ring, mode, lambda piece, i, part: visit(piece, (2 * ring.index - i) % ring.size, part))


def _every_time_is_the_first(self: MeshModel, shape: tuple[int, ...], start: jax.Array) -> Any:
    """Each chip takes its part of the prompt for the first one."""
    step, axes = _step_tokens(self, shape, start), self.sharding.attention.time
    return step._replace(positions=step.positions - lax.axis_index(axes)) if axes else step


def _next_chip(axes: tuple[str, ...]) -> Striping | None:
    """Each chip takes its keys for those of the next."""
    mine = striping(axes)
    return mine and Striping((mine.chip + 1) % mine.chips, mine.chips)


def _written_everywhere(
    start: jax.Array, time: int, stripes: Striping | None, *, split: bool, end: int
) -> jax.Array:
    """Every chip writes a token at the index at which one should."""
    return start if stripes is None else start // stripes.chips


def _sums_of_other_peaks(running: Any, axes: tuple[str, ...]) -> Any:
    """Results of chips added although each is relative to the largest score of its own."""
    if not axes:
        return running
    sums = [lax.psum(part, axes) for part in (running.total, running.output)]
    return dataclasses.replace(running, peak=lax.pmax(running.peak, axes), total=sums[0], output=sums[1])


def _own_segments(**changes: Callable[[Any], Any]) -> Patch:
    """Changes the rows' own segments beside shared ones."""

    def changed(*args: Any) -> Any:
        *shared, own = attended(*args)
        return [*shared, dataclasses.replace(own, **{name: change(own) for name, change in changes.items()})]

    return sharded_layer, "attended", changed


def _one_key_more(self: SharedPrefixes, *args: Any) -> Any:
    return [dataclasses.replace(s, length=s.length + 1, start=s.start - 1) for s in _segments(self, *args)]


def _cache_scales(change: Callable[[jax.Array], jax.Array]) -> Patch:
    """Changes the scales that a layer finds in its int8 cache."""

    def changed(self: ShardedLayer, x: jax.Array, cache: KVCache, *args: Any, **kwargs: Any) -> Any:
        k = cache.k.replace(scale=change(cache.k.scale))
        return _call(self, x, cache.replace(k=k), *args, **kwargs)

    return ShardedLayer, "__call__", changed


MISTAKES: dict[str, tuple[Where, Patch]] = {
    "cache_of_another_batch_shard": (
        (MULTIQUERY, TRADED),
        (sharded_layer, "reduce_kv", lambda p, s, d: _reduce_kv(jnp.roll(p, 1, axis=0), s, d)),
    ),
    "positions_of_another_batch_shard": (
        (GROUPED, TRADED),
        (transformer, "my_rows", lambda x, s: _my_rows(jnp.roll(x, 1, axis=0), s)),
    ),
    "heads_not_regrouped": ((GROUPED, TRADED), (attn_all_to_all, "_regroup", lambda x, order, wanted: x)),
    "heads_swapped_on_the_way_back": (
        (MULTIQUERY, TRADED),
        (sharded_layer, "gather_rows", lambda a, s, b: _gather_rows(jnp.flip(a, axis=2), s, b)),
    ),
    "all_to_all_over_x_first": ((MULTIQUERY, TRADED), (sharded_layer, "scatter_rows", _x_first)),
    "rope_of_queries_off_by_one": (
        (GROUPED, BY_HEADS),
        _step(lambda model, at, step: step._replace(q_phases=rope_phases(model.hparams, at + 1))),
    ),
    "padding_attended": (
        (GROUPED, TRADED),
        _step(lambda m, at, step: step._replace(positions=step.positions + 1, length=step.length + 1)),
    ),
    "cache_written_one_position_off": (
        (GROUPED, BY_HEADS),
        (transformer, "write_index", lambda *args, **kwargs: _write_index(*args, **kwargs) + 1),
    ),
    "kv_head_of_another_group": (
        (GROUPED, BY_HEADS),
        (sharded_layer, "reduce_kv", lambda p, s, d: _reduce_kv(jnp.roll(p, 1, axis=3), s, d)),
    ),
    "int8_scale_lost": ((GROUPED, INT8), _input(lambda weight, bias: (_ones(weight), bias))),
    "int8_scale_of_another_chip": ((GROUPED, INT8), _input(lambda weight, bias: (_rolled(weight), bias))),
    "int8_cache_scales_lost": ((GROUPED, INT8_CACHE), _cache_scales(jnp.ones_like)),
    "int8_cache_scales_of_another_position": (
        (GROUPED, INT8_CACHE), _cache_scales(lambda scale: jnp.roll(scale, 1, axis=-1))
    ),
    "shared_prefix_lost": (
        (GROUPED, SHARED), (sharded_layer, "attended", lambda *args: attended(*args)[-1:])
    ),
    "shared_prefix_counts_for_nothing": ((GROUPED, SHARED), _own_segments(start=lambda own: own.start * 0)),
    "shared_prefix_of_another_row": (
        (GROUPED, SHARED),
        (MeshModel, "_attention_rows", lambda self, x: _attention_rows(self, jnp.roll(x, 1, axis=0))),
    ),
    "shared_prefix_with_a_key_too_many": (
        (MULTIQUERY, SHARED), (SharedPrefixes, "segments", _one_key_more)
    ),
    "xpos_of_int8_keys_lost": (
        (XPOS, INT8_CACHE),
        (transformer, "stored_keys", lambda hparams, phases, cache: (unstretched(phases), None)),
    ),
    "xpos_of_int8_keys_twice": (
        (XPOS, INT8_CACHE),
        (transformer, "stored_keys", lambda *args: (args[1], stored_keys(*args)[1])),
    ),
    "bias_of_the_first_chip": (
        (GROUPED, BY_HEADS), _input(lambda weight, bias: (weight, _first_chunk(bias)))
    ),
    "half_of_the_chips_not_summed": (
        (GROUPED, BY_HEADS), (WeightStationary1D, "project_out", _one_plane_of_z)
    ),
    "axis_not_reduced": ((GROUPED, TRADED), (WeightStationary2D, "project_out", _z_not_reduced)),
    "norm_of_the_local_part": ((SERIAL, TRADED), (sharded_layer, "sharded_norm", _local_norm)),
    "window_lost": ((GROUPED, TRADED), (ShardedLayer, "__call__", _no_window)),
    "embedding_shards_in_another_order": ((GROUPED, TRADED), (MeshModel, "_embed", _embed_zy)),
    "columns_of_another_group": ((GROUPED, GATHERED_XY), (weight_gathered._Groups, "put", _next_group)),
    "rows_of_another_x": ((MULTIQUERY, GATHERED_XY), (weight_gathered._SumOfParts, "visit", _next_part)),
    "embed_of_another_x": ((GROUPED, GATHERED_XY), (weight_gathered._PartsOfEmbed, "visit", _next_embed)),
    "rest_not_reduced": (
        (GROUPED, GATHERED_XY), (weight_gathered.WeightGathered, "project_out", _rest_not_reduced)
    ),
    "int8_scale_of_the_first_group": (
        (GROUPED, GATHERED_INT8), (sharded_layer, "_beside", lambda vectors, group: _beside(vectors, 0))
    ),
    "time_part_taken_for_the_first": (
        (GROUPED, LONG_PROMPT), (MeshModel, "_step_tokens", _every_time_is_the_first)
    ),
    "keys_of_another_time_part": ((GROUPED, LONG_PROMPT), (transformer, "striping", _next_chip)),
    "a_hop_too_few": (
        (MULTIQUERY, DEALT), (cache_ring, "Arc", lambda start, count: Arc(start, count - 1))
    ),
    "times_not_traded_back": (
        (GROUPED, DEALT),
        (sharded_layer, "gather_rows", lambda a, s, b: _gather_rows(jnp.roll(a, 1, axis=1), s, b)),
    ),
    "dealt_token_written_everywhere": (
        (MULTIQUERY, DEALT), (transformer, "write_index", _written_everywhere)
    ),
    "dealt_results_not_weighed": ((GROUPED, DEALT), (attention, "_over_chips", _sums_of_other_peaks)),
    "dealt_positions_inserted_as_they_lie": (
        (GROUPED, DEALT_ANEW), (cache_insert, "gathered", lambda x, *_: x)
    ),
    "inserted_row_reversed_in_time": (
        (GROUPED, TWO_LAYOUTS),
        (cache_insert, "_moved", lambda row, *to: jnp.flip(_moved(row, *to), axis=-2)),
    ),
    "inserted_into_the_next_slot": (
        (MULTIQUERY, TWO_LAYOUTS),
        (cache_insert, "_overwrite", lambda leaf, row, at, dim: _overwrite(leaf, row, at + 1, dim)),
    ),
    "rows_of_z_exchanged": (
        (GROUPED, BATCH_Z),
        (WeightStationary2D, "reduce_embedding", lambda ops, x: _embedding(ops, jnp.roll(x, 1, axis=0))),
    ),
    "logits_shards_in_another_order": ((GROUPED, BY_HEADS), (MeshModel, "logits", _other_y)),
}  # fmt: skip


def test_at_least_twelve_mistakes_are_planted() -> None:
    assert len(MISTAKES) >= 12


@pytest.mark.parametrize(
    "where", dict.fromkeys(where for where, _ in MISTAKES.values()),
    ids=lambda where: f"{where[1].prefill_layout.value}-{where[1].layout.value}-{where[1].weights}",
)  # fmt: skip
def test_check_passes_without_a_mistake(where: Where) -> None:
    row = outcome(where)
    assert row.ok, row
    assert row.tokens_equal


@pytest.mark.parametrize("name", MISTAKES)
def test_check_reports_every_planted_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, patch = MISTAKES[name]
    monkeypatch.setattr(*patch)
    row = outcome(where)
    assert not row.ok, row
    assert not row.max_rel_err <= 1e-3, "a mistake that moves the logits by less is no mistake"


def test_check_reports_a_ring_that_turns_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, case = MeshShape(4, 2, 1), dataclasses.replace(GATHERED_XY, collectives=CollectiveMode.ONE_WAY)
    along_four = Checker(synthetic_state(GROUPED), shape, make_mesh(shape), longest=6, steps=4)
    assert along_four.run(case).ok
    monkeypatch.setattr(weight_gathered, "walk", _wrong_way)
    assert not along_four.run(case).ok
