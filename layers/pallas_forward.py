"""The forward kernel of block attention on a TPU: an online softmax over tiles of keys.

It starts from what the ring has summed so far, so that joining a block to it costs nothing of its own: the
running maximum starts at the log-sum-exp, the sum at 1, the values at the output.

Data flow, for a tile of queries of one head: (lse, output) → m, l, acc in VMEM → tiles of keys that are
needed → (m + log l, acc / l), written over what came in.

Worked example: grid (batch, heads, tiles of queries, tiles of keys); with 8 tiles of keys of which 2 and 3
are needed, steps 0 and 1 wait with tile 2 already here, 2 and 3 compute, 4 to 7 do nothing and fetch
nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from layers.attention_blocks import ScoreForm
from layers.pallas_tiles import (
    KernelInputs,
    KernelTiles,
    TileSpecs,
    at_rows,
    matmul,
    seen_rows,
    tile_mask,
    tile_range,
    tile_scores,
)
from layers.softmax_merge import is_empty


def _kernel(
    form: ScoreForm,
    last: int,
    low: jax.Ref,
    high: jax.Ref,
    bounds: jax.Ref,
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    q_places: jax.Ref,
    k_places: jax.Ref,
    output_before: jax.Ref,
    lse_before: jax.Ref,
    output: jax.Ref,
    lse: jax.Ref,
    peak: jax.Ref,
    total: jax.Ref,
    values: jax.Ref,
) -> None:
    """One tile of keys; the running softmax is in the last three, `[1, queries]` and `[qkv, queries]`."""
    batch, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        before = lse_before[...]
        peak[...] = before
        total[...] = jnp.where(is_empty(before), 0.0, 1.0)
        values[...] = output_before[...].T

    @pl.when((low[batch, i] <= j) & (j < high[batch, i]))
    def _() -> None:
        mask = tile_mask(q_places[...], k_places[...], bounds[0], bounds[1])
        keys = seen_rows(k[...], mask)
        scores = jnp.where(mask, tile_scores(q[...], keys, form)[0], -jnp.inf)
        highest = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        base = jnp.where(is_empty(highest), 0.0, highest)
        weights = jnp.exp(scores - base)
        fade = jnp.exp(peak[...] - base)
        weighed = matmul(seen_rows(v[...], mask), weights.astype(v.dtype), (0, 0))
        peak[...] = highest
        total[...] = total[...] * fade + jnp.sum(weights, axis=0, keepdims=True)
        values[...] = values[...] * fade + weighed

    @pl.when(j == last)
    def _() -> None:
        safe = jnp.where(total[...] > 0, total[...], 1.0)
        output[...] = (values[...] / safe).T
        lse[...] = jnp.where(total[...] > 0, peak[...] + jnp.log(safe), -jnp.inf)


def forward_kernel(
    inputs: KernelInputs,
    running: tuple[jax.Array, jax.Array],
    bounds: jax.Array,
    form: ScoreForm,
    tiles: KernelTiles,
    interpret: pltpu.InterpretParams | bool,
) -> tuple[jax.Array, jax.Array]:
    """Output `[batch, heads, rows, qkv]` and log-sum-exp `[batch, heads, 1, rows]`, `running` included."""
    batch, heads, _, qkv = inputs.q.shape
    rows, columns = tiles.queries, tiles.keys
    specs = TileSpecs(tiles, qkv, at_rows(tiles))
    kind = jax.typeof(inputs.q).manual_axis_type
    return pl.pallas_call(
        functools.partial(_kernel, form, columns.count - 1),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32, manual_axis_type=kind) for x in running],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, rows.count, columns.count),
            in_specs=[*specs.inputs, specs.queries, specs.row],
            out_specs=[specs.queries, specs.row],
            scratch_shapes=[
                pltpu.VMEM((1, rows.size), jnp.float32),
                pltpu.VMEM((1, rows.size), jnp.float32),
                pltpu.VMEM((qkv, rows.size), jnp.float32),
            ],
        ),
        input_output_aliases={8: 0, 9: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="block_attention_forward",
    )(*tile_range(inputs.needed), bounds, *inputs.arrays, *running)
