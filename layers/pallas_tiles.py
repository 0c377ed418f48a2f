"""What the Pallas kernels of block attention share: tiles, their masks and scores, and which are needed.

In a kernel a tile of scores is held with keys down and queries across, `[keys, queries]`: what belongs to a
query (its maximum, sum, log-sum-exp, delta, place) is then a row that lies along the lanes of a register,
and reaches memory as it is. With queries down it would be a column, which the TPU pads to 128 times its
size.

Data flow: arrays in the order of the ring → heads first, `[batch, heads, time, qkv]`, padded to whole tiles →
kernel → back. XLA turns these transpositions into layouts where it can.

Worked example: 1,000 queries in tiles of at most 512 are two tiles of 512; the last 24 rows are padding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from layers.attention_blocks import PADDING, POSITION, SEGMENT, Block, ScoreForm, without_padding
from layers.attention_walk import Tiles, needed_tiles
from layers.numerics import softcap

LANES = 128
Index = Any  # a number of a grid step: an int32 scalar of whatever kind the kernel's form has


@dataclasses.dataclass(frozen=True)
class KernelTiles:
    """Tiles of queries and of keys, and query heads to a kv head."""

    queries: Tiles
    keys: Tiles
    group: int

    @classmethod
    def of(cls, block: Block, queries: int, keys: int) -> "KernelTiles":
        """Tiles of at most so many tokens, multiples of 128."""
        q, k = block.queries.q, block.keys.k
        rows, columns = lane_tiles(q.shape[1], queries), lane_tiles(k.shape[1], keys)
        return cls(rows, columns, q.shape[2] // k.shape[2])


def lane_tiles(length: int, largest: int) -> Tiles:
    """Tiles whose size is a multiple of the lanes."""
    size = min(largest, -(-length // LANES) * LANES)
    return Tiles(length, size, -(-length // size))


def heads_first(
    x: Float[Array, "batch time heads qkv"], tiles: Tiles
) -> Float[Array, "batch heads rows qkv"]:
    """In the kernel's order, padded to whole tiles."""
    return jnp.swapaxes(tiles.pad(x, 1), 1, 2)


def heads_last(x: Float[Array, "batch heads rows qkv"], tiles: Tiles) -> Float[Array, "batch time heads qkv"]:
    """The inverse of `heads_first`."""
    return tiles.unpad(jnp.swapaxes(x, 1, 2))


def rows_across(x: Float[Array, "batch time heads"], tiles: Tiles) -> Float[Array, "batch heads 1 rows"]:
    """Numbers of the rows, along the lanes."""
    return jnp.swapaxes(tiles.pad(x, 1), 1, 2)[:, :, None, :]


@dataclasses.dataclass(frozen=True)
class KernelInputs:
    """The arrays of a block in the kernels' order.

    Attributes:
      q: `[batch, heads, rows, qkv]`, zero in padding.
      k, v: `[batch, kv_heads, columns, qkv]`.
      q_places: `[batch, 2, rows]`.
      k_places: `[batch, columns, 2]`, down, as the keys are.
      needed: `[batch, row tiles, column tiles]`: whether any query of a tile may see a key of another.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_places: jax.Array
    k_places: jax.Array
    needed: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The kernels' first operands."""
        return self.q, self.k, self.v, self.q_places, self.k_places

    @classmethod
    def of(cls, block: Block, tiles: KernelTiles) -> "KernelInputs":
        """From the arrays of a ring."""
        rows, columns = tiles.queries, tiles.keys
        q_places = rows.pad(block.queries.places, 2, PADDING)
        k_places = columns.pad(block.keys.places, 2, PADDING)
        return cls(
            heads_first(without_padding(block.queries.places, block.queries.q), rows),
            heads_first(block.keys.k, columns),
            heads_first(block.keys.v, columns),
            q_places,
            jnp.swapaxes(k_places, 1, 2),
            needed_tiles(q_places, k_places, block.bounds, rows, columns),
        )


def tile_range(needed: Bool[Array, "batch outer inner"]) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """For each outer tile the first inner one that is needed, and the one after the last; (0, 0) for none."""
    count = needed.shape[2]
    numbers = jnp.arange(count, dtype=jnp.int32)[None, None, :]
    high = jnp.max(jnp.where(needed, numbers + 1, 0), axis=2)
    low = jnp.min(jnp.where(needed, numbers, count), axis=2)
    return jnp.minimum(low, high), high


class TileAt(NamedTuple):
    """Which tile a grid step works on."""

    batch: Index
    head: Index
    kv_head: Index
    row: Index
    column: Index


@dataclasses.dataclass(frozen=True)
class TileSpecs:
    """How each kind of array is cut: `at` says where a grid step is, from its place and the prefetched."""

    tiles: KernelTiles
    qkv: int
    at: Callable[..., TileAt]

    @property
    def queries(self) -> pl.BlockSpec:
        """`[batch, heads, rows, qkv]`."""
        return self._spec(
            (None, None, self.tiles.queries.size, self.qkv), lambda at: (at.batch, at.head, at.row, 0)
        )

    @property
    def row(self) -> pl.BlockSpec:
        """`[batch, heads, 1, rows]`."""
        return self._spec((None, None, 1, self.tiles.queries.size), lambda at: (at.batch, at.head, 0, at.row))

    @property
    def keys(self) -> pl.BlockSpec:
        """`[batch, kv_heads, columns, qkv]`."""
        shape = (None, None, self.tiles.keys.size, self.qkv)
        return self._spec(shape, lambda at: (at.batch, at.kv_head, at.column, 0))

    @property
    def inputs(self) -> list[pl.BlockSpec]:
        """q, k, v, q_places, k_places."""
        rows = self._spec((None, 2, self.tiles.queries.size), lambda at: (at.batch, 0, at.row))
        columns = self._spec((None, self.tiles.keys.size, 2), lambda at: (at.batch, at.column, 0))
        return [self.queries, self.keys, self.keys, rows, columns]

    def _spec(
        self, shape: tuple[int | None, ...], where: Callable[[TileAt], tuple[Index, ...]]
    ) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *step: where(self.at(*step)))


def at_rows(tiles: KernelTiles) -> Callable[..., TileAt]:
    """For grids (batch, heads, row tiles, column tiles)."""

    def at(
        batch: Index, head: Index, row: Index, column: Index, low: jax.Ref, high: jax.Ref, _: jax.Ref
    ) -> TileAt:
        column = _nearest(column, low[batch, row], high[batch, row])
        return TileAt(batch, head, head // tiles.group, row, column)

    return at


def at_columns(tiles: KernelTiles) -> Callable[..., TileAt]:
    """For grids (batch, kv_heads, column tiles, group · row tiles)."""

    def at(
        batch: Index, kv_head: Index, column: Index, step: Index, low: jax.Ref, high: jax.Ref, _: jax.Ref
    ) -> TileAt:
        count = jnp.int32(tiles.queries.count)
        head = kv_head * tiles.group + lax.div(step, count)
        row = _nearest(lax.rem(step, count), low[batch, column], high[batch, column])
        return TileAt(batch, head, kv_head, row, column)

    return at


def _nearest(tile: Index, low: Index, high: Index) -> Index:
    """The tile, or the needed one next to it, so that nothing is fetched for a step that does nothing."""
    return jnp.clip(tile, low, jnp.maximum(high - 1, low))


def tile_mask(
    q_places: Int[Array, "2 queries"], k_places: Int[Array, "keys 2"], left: jax.Array, right: jax.Array
) -> Bool[Array, "keys queries"]:
    """Which key each query sees, keys down."""
    distance = q_places[POSITION : POSITION + 1] - k_places[:, POSITION : POSITION + 1]
    segment = k_places[:, SEGMENT : SEGMENT + 1]
    same = (q_places[SEGMENT : SEGMENT + 1] == segment) & (segment != PADDING)
    return same & (distance <= left) & (distance >= -right)


def seen_rows(x: Float[Array, "keys qkv"], mask: Bool[Array, "keys queries"]) -> Float[Array, "keys qkv"]:
    """Keys or values with zero where no query of the tile sees them."""
    seen = jnp.max(mask.astype(jnp.float32), axis=1, keepdims=True) > 0
    return jnp.where(seen, x.astype(jnp.float32), 0.0).astype(x.dtype)


def tile_scores(
    q: Float[Array, "queries qkv"], k: Float[Array, "keys qkv"], form: ScoreForm
) -> tuple[Float[Array, "keys queries"], jax.Array | float]:
    """Scores in float32, and d score / d (q·k)."""
    scores = softcap(matmul(k, q, (1, 1)) * form.scale, form.cap)
    slope = form.scale if form.cap is None else form.scale * (1 - jnp.square(scores / form.cap))
    return scores, slope


def matmul(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """A product of two tiles over one dim of each, in float32; float32 inputs count in full."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
