"""The two backward kernels of block attention on a TPU: one sums dq over keys, one dk and dv over queries.

Both compute the weights of a tile again from the saved log-sum-exp. A sum over tiles stays in VMEM, which
is why there are two: dq sums over the tiles of keys of one tile of queries, dk and dv over the tiles of
queries of all heads of a group.

Data flow, keys down: scores → weights = e^(s − lse) → d_weights = v·d_outputᵀ → d_scores = weights ·
(d_weights − delta) → dq += d_scoresᵀ·k, dk += d_scores·q, dv += weights·d_output.

Worked example: 4 query heads to a kv head and 8 tiles of queries: for each tile of keys 32 steps, of which
a causal mask leaves those from the diagonal on.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layers.attention_blocks import ScoreForm
from layers.pallas_tiles import (
    KernelInputs,
    KernelTiles,
    TileSpecs,
    at_columns,
    at_rows,
    matmul,
    seen_rows,
    tile_mask,
    tile_range,
    tile_scores,
)
from layers.softmax_merge import is_empty


class RowGradients(NamedTuple):
    """d_output `[batch, heads, rows, qkv]`, lse and delta `[batch, heads, 1, rows]`."""

    d_output: jax.Array
    lse: jax.Array
    delta: jax.Array


class _Tile(NamedTuple):
    """References to the tiles that both kernels read."""

    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    q_places: jax.Ref
    k_places: jax.Ref
    d_output: jax.Ref
    lse: jax.Ref
    delta: jax.Ref

    def weights(self, bounds: jax.Ref, form: ScoreForm) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weights and d_scores, keys down, and the keys."""
        mask = tile_mask(self.q_places[...], self.k_places[...], bounds[0], bounds[1])
        keys = seen_rows(self.k[...], mask)
        scores, slope = tile_scores(self.q[...], keys, form)
        lse = self.lse[...]
        weights = jnp.where(mask, jnp.exp(scores - jnp.where(is_empty(lse), 0.0, lse)), 0.0)
        d_weights = matmul(seen_rows(self.v[...], mask), self.d_output[...], (1, 1))
        d_scores = jnp.where(mask, weights * (d_weights - self.delta[...]) * slope, 0.0)
        return weights, d_scores, keys


def _dq_kernel(
    form: ScoreForm, last: int, low: jax.Ref, high: jax.Ref, bounds: jax.Ref, *refs: jax.Ref
) -> None:
    """One tile of keys of a tile of queries; references are inputs, dq before, dq, its sum."""
    tile, (before, dq, total) = _Tile(*refs[:8]), refs[8:]
    batch, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        total[...] = before[...]

    @pl.when((low[batch, i] <= j) & (j < high[batch, i]))
    def _() -> None:
        _, d_scores, keys = tile.weights(bounds, form)
        total[...] += matmul(d_scores.astype(keys.dtype), keys, (0, 0))

    @pl.when(j == last)
    def _() -> None:
        dq[...] = total[...]


def _dkv_kernel(
    form: ScoreForm,
    count: int,
    last: int,
    low: jax.Ref,
    high: jax.Ref,
    bounds: jax.Ref,
    *refs: jax.Ref,
) -> None:
    """One tile of queries of a tile of keys; `count` tiles of queries to a head."""
    tile, (dk, dv, k_total, v_total) = _Tile(*refs[:8]), refs[8:]
    batch, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i = jax.lax.rem(step, jnp.int32(count))

    @pl.when(step == 0)
    def _() -> None:
        k_total[...] = jnp.zeros(k_total.shape, jnp.float32)
        v_total[...] = jnp.zeros(v_total.shape, jnp.float32)

    @pl.when((low[batch, j] <= i) & (i < high[batch, j]))
    def _() -> None:
        weights, d_scores, _ = tile.weights(bounds, form)
        q, d_output = tile.q[...], tile.d_output[...]
        k_total[...] += matmul(d_scores.astype(q.dtype), q, (1, 0))
        v_total[...] += matmul(weights.astype(d_output.dtype), d_output, (1, 0))

    @pl.when(step == last)
    def _() -> None:
        dk[...] = k_total[...]
        dv[...] = v_total[...]


def dq_kernel(
    inputs: KernelInputs,
    rows_of: RowGradients,
    before: jax.Array,
    bounds: jax.Array,
    form: ScoreForm,
    tiles: KernelTiles,
    interpret: pltpu.InterpretParams | bool,
) -> jax.Array:
    """dq `[batch, heads, rows, qkv]` float32 with `before` included."""
    batch, heads, _, qkv = inputs.q.shape
    rows, columns = tiles.queries, tiles.keys
    specs = TileSpecs(tiles, qkv, at_rows(tiles))
    kind = jax.typeof(inputs.q).manual_axis_type
    return pl.pallas_call(
        functools.partial(_dq_kernel, form, columns.count - 1),
        out_shape=jax.ShapeDtypeStruct(before.shape, jnp.float32, manual_axis_type=kind),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, rows.count, columns.count),
            in_specs=[*specs.inputs, specs.queries, specs.row, specs.row, specs.queries],
            out_specs=specs.queries,
            scratch_shapes=[pltpu.VMEM((rows.size, qkv), jnp.float32)],
        ),
        input_output_aliases={11: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="block_attention_dq",
    )(*tile_range(inputs.needed), bounds, *inputs.arrays, *rows_of, before)


def dkv_kernel(
    inputs: KernelInputs,
    rows_of: RowGradients,
    bounds: jax.Array,
    form: ScoreForm,
    tiles: KernelTiles,
    interpret: pltpu.InterpretParams | bool,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv `[batch, kv_heads, columns, qkv]` float32."""
    batch, kv_heads, _, qkv = inputs.k.shape
    rows, columns, group = tiles.queries, tiles.keys, tiles.group
    specs = TileSpecs(tiles, qkv, at_columns(tiles))
    kind = jax.typeof(inputs.q).manual_axis_type
    result = jax.ShapeDtypeStruct(inputs.k.shape, jnp.float32, manual_axis_type=kind)
    return pl.pallas_call(
        functools.partial(_dkv_kernel, form, rows.count, group * rows.count - 1),
        out_shape=[result, result],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, columns.count, group * rows.count),
            in_specs=[*specs.inputs, specs.queries, specs.row, specs.row],
            out_specs=[specs.keys, specs.keys],
            scratch_shapes=[pltpu.VMEM((columns.size, qkv), jnp.float32)] * 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="block_attention_dkv",
    )(*tile_range(jnp.swapaxes(inputs.needed, 1, 2)), bounds, *inputs.arrays, *rows_of)
