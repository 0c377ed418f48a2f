"""The weight-gathered layouts: activations stay, split by batch (or time), and the weights pass by.

Weights are stored exactly as in 2D; what moves is a layer's shards, over the gathered axes G, and activations
over the rest R = axes − G, along which columns and heads stay split as in 1D:

  residual     [batch.G, time, embed.R], or [batch, time.G, embed.R]
  gather       all-gather over R                     → [batch.G, time, embed]
  project_in   shards of wi pass by                  → columns of all chunks along G, its own along R
  project_out  shards of wo pass by                  → [batch.G, time, embed] {R unreduced}
               reduce-scatter over R                 → [batch.G, time, embed.R]

A shard `[X, rows, cols]` of wi holds rows (one x part of embed) and the columns of X chunks (y, z, ·): walked
over x the products add up, walked over y and z they stand side by side. A shard of wo is the transpose of
that. So the ring over x is the inner one, and each group of X chunks is finished, activation function
included, before the next: no chip ever holds the products of all columns in float32.

Worked example: 2,2,2 gathered over XY, batch 8: a chip has 2 rows, all 4 chunks (y, x) of its z, a half of
the heads; per layer it receives 3 of 4 shards of each matrix.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from layers.collectives.mode import CollectiveConfig
from layers.collectives.products import Part
from layers.collectives.reductions import reduce_scatter
from layers.collectives.ring import Index, Ring
from layers.collectives.weight_ring import groups, walk
from layers.layout import LayoutForm
from layers.mesh_shape import AXES
from layers.sharded_ops import all_gather, local_part, zeros_varying_as


@dataclasses.dataclass(frozen=True)
class WeightGathered:
    """See the module's docstring."""

    form: LayoutForm
    config: CollectiveConfig
    embed_axes = ()

    @property
    def _rest(self) -> tuple[str, ...]:
        return self.form.embed

    @property
    def _split_dim(self) -> int:
        """The residual's dim that the gathered axes split: batch or time."""
        return 0 if self.form.batch else 1

    @jax.named_scope("residual")
    def gather(self, x: jax.Array) -> jax.Array:
        """embed.R → embed."""
        return all_gather(x, self._rest, 2)

    def to_embed_x(self, x: jax.Array) -> jax.Array:
        """The residual as [batch, time, embed.X]."""
        whole = all_gather(self.gather(x), self.form.gathered, self._split_dim)
        return local_part(whole, ("x",), 2)

    def project_in(
        self, n: jax.Array, matrix: jax.Array, layer: Index | None, finish: Callable[[jax.Array, Index], Any]
    ) -> Any:
        """Products with all columns of this chip's chunks, group by group; see `LayoutOps.project_in`."""
        shard, inner, outer = self._operands(matrix, layer)
        rows = shard.shape[1]
        parts = n.reshape(*n.shape[:2], inner.size, rows)  # [batch, time, x parts, rows]
        collected = _Groups(outer.size)
        for group, held, fence in groups(shard, outer, self.config.mode):
            sums = _SumOfParts(parts)
            walk(held, inner, self.config.mode, sums.visit)
            finished = finish(sums.total(), group)  # of [X, batch, time, cols] in float32
            fence.set(jax.tree.leaves(finished)[-1])  # float32 products of one group at a time
            collected.put(finished, group)
        return collected.chunks()

    def project_out(self, h: Sequence[jax.Array], matrix: jax.Array, layer: Index | None) -> jax.Array:
        """Parts [chunks, batch, time, rows], joined group by group → float32 in the residual's sharding."""
        shard, inner, outer = self._operands(matrix, layer)
        grouped = [part.reshape(outer.size, inner.size, *part.shape[1:]) for part in h]
        side_by_side = _PartsOfEmbed(h[0], inner.size * shard.shape[2])
        for group, held, fence in groups(shard, outer, self.config.mode):
            mine = [lax.dynamic_index_in_dim(part, group, keepdims=False) for part in grouped]
            side_by_side.h = jnp.concatenate(mine, axis=-1)
            walk(held, inner, self.config.mode, side_by_side.visit)
            fence.set(side_by_side.total)
        return reduce_scatter(side_by_side.total, self._rest, self.config.reduce_dtype, dimension=2)

    def project_kv(self, n: jax.Array, matrix: jax.Array) -> jax.Array:
        """n [batch, time, embed] → float32 k and v columns {R unreduced}."""
        gathered = lax.all_gather(matrix, self.form.gathered)  # [parts along G, rows, cols]
        parts = n.reshape(*n.shape[:2], gathered.shape[0], -1)  # [batch, time, parts along G, R·rows]
        mine = local_part(parts, self._rest, 3)
        return jnp.einsum("btgr,grc->btc", mine, gathered.astype(n.dtype), preferred_element_type=jnp.float32)

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """[batch, time, embed.X] {y, z unreduced} → the residual's sharding; exact in any dtype."""
        split = self._split_dim
        x = lax.all_to_all(rows, "x", split_axis=split, concat_axis=2, tiled=True)
        for axis in ("y", "z"):
            dimension = split if axis in self.form.gathered else 2
            x = lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
        return x

    def _operands(self, matrix: jax.Array, layer: Index | None) -> tuple[jax.Array, Ring, Ring]:
        """This chip's shard [X, rows, cols], the ring over x, and the one over what else is gathered."""
        shard = matrix if layer is None else lax.dynamic_index_in_dim(matrix, layer, keepdims=False)
        outer = tuple(axis for axis in self.form.held if axis != "x")
        size = self.config.max_unrolled
        return shard, Ring.over("x", size), Ring.over(outer, size)


class _SumOfParts:
    """Σ over x parts of embed of n's part times a shard; a shard in two pieces has a sum for each."""

    def __init__(self, parts: jax.Array) -> None:
        self.parts, self.totals = parts, dict[int, jax.Array]()

    def visit(self, piece: jax.Array, index: Index, part: Part) -> jax.Array:
        """Adds one product; see `weight_ring.walk`."""
        n = lax.dynamic_index_in_dim(self.parts, index, axis=2, keepdims=False)
        product = jnp.einsum("btr,nrc->nbtc", n, piece.astype(n.dtype), preferred_element_type=jnp.float32)
        sum_so_far = self.totals.get(part.start)
        self.totals[part.start] = product if sum_so_far is None else sum_so_far + product
        return self.totals[part.start]

    def total(self) -> jax.Array:
        """[chunks, batch, time, cols]."""
        pieces = [self.totals[start] for start in sorted(self.totals)]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


class _PartsOfEmbed:
    """h times a shard, added into the x part of embed that the shard's columns are."""

    def __init__(self, h: jax.Array, embed: int) -> None:
        self.h = h
        self.total = zeros_varying_as(h, (*h.shape[1:3], embed), AXES)

    def visit(self, piece: jax.Array, index: Index, part: Part) -> jax.Array:
        """Adds one product; see `weight_ring.walk`."""
        h = self.h[part.start : part.stop]
        product = jnp.einsum("nbtr,nrc->btc", h, piece.astype(h.dtype), preferred_element_type=jnp.float32)
        width = product.shape[2]
        start = jnp.asarray(index, jnp.int32) * width
        sum_so_far = lax.dynamic_slice_in_dim(self.total, start, width, axis=2)
        self.total = lax.dynamic_update_slice_in_dim(self.total, sum_so_far + product, start, axis=2)
        return self.total


class _Groups:
    """What each group of chunks became, written to its place among all of them."""

    def __init__(self, count: int) -> None:
        self.count, self.held = count, None

    def put(self, finished: Any, group: Index) -> None:
        """Stores the results `[X, …]` of one group."""
        if self.held is None:
            self.held = jax.tree.map(
                lambda leaf: zeros_varying_as(leaf, (self.count, *leaf.shape), AXES, leaf.dtype), finished
            )
        at = jnp.asarray(group, jnp.int32)
        self.held = jax.tree.map(
            lambda whole, leaf: lax.dynamic_update_index_in_dim(whole, leaf, at, 0), self.held, finished
        )

    def chunks(self) -> Any:
        """Leaves as [groups · X, …]."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self.held)
