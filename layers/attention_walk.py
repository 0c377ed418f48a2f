"""Block attention in plain XLA with bounded memory: a walk over tiles of queries and of keys.

For each tile of queries only the tiles of keys from the first to the last that any of them can see are
walked, by position and segment; an online softmax joins them. The backward pass walks the same tiles once,
adding to dk and dv in place. No array is larger than a tile of scores, and no time × time array exists.

Data flow: queries, keys → tiles (padded to whole ones with padding tokens) → ranges needed → walk → unpadded.

Worked example: 1,024 queries and keys, causal, in tiles of 256 × 512: the four tiles of queries walk 1, 1,
2 and 2 tiles of keys, 6 of 8.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from layers.attention_blocks import (
    PADDING,
    POSITION,
    SEGMENT,
    Block,
    Bounds,
    Gradients,
    Keys,
    OutputGradient,
    Queries,
    ScoreForm,
    block_gradients,
    block_scores,
    by_kv_head,
    normalised,
    product,
    row_mask,
    seen_alone,
    visible,
    without_padding,
)
from layers.softmax_merge import Partial, is_empty, merge

FAR = 2**29  # beyond every position; differences of two such stay within int32


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A dim of `length` tokens as `count` tiles of `size`; the last may hold padding."""

    length: int
    size: int
    count: int

    @classmethod
    def of(cls, length: int, largest: int) -> "Tiles":
        """As few tiles of at most `largest` tokens as possible, as equal as possible."""
        count = max(1, -(-length // largest))
        return cls(length, -(-length // count), count)

    def pad(self, x: jax.Array, axis: int, fill: int = 0) -> jax.Array:
        """x with whole tiles along an axis."""
        missing = self.count * self.size - self.length
        if not missing:
            return x
        widths = [(0, missing if dim == axis else 0) for dim in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    def cut(self, x: jax.Array, i: jax.Array | int, axis: int) -> jax.Array:
        """Tile i of x."""
        return lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def put(self, x: jax.Array, tile: jax.Array, i: jax.Array | int, axis: int = 1) -> jax.Array:
        """x with tile i replaced."""
        return lax.dynamic_update_slice_in_dim(x, tile.astype(x.dtype), i * self.size, axis)

    def unpad(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """x without the padding."""
        return x if x.shape[axis] == self.length else lax.slice_in_dim(x, 0, self.length, axis=axis)


@flax.struct.dataclass
class _Running:
    """Online softmax of a tile's rows, `[batch, kv_heads, time, group]`, and the unnormalised output."""

    peak: jax.Array
    total: jax.Array
    output: jax.Array


def needed_range(
    q_places: Int[Array, "batch 2 time"], k_places: Int[Array, "batch 2 keys"], bounds: Bounds, tiles: Tiles
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """First tile of keys that a query may see, and the one after the last; equal if there is none."""
    rows = Tiles(q_places.shape[2], q_places.shape[2], 1)
    needed = jnp.any(needed_tiles(q_places, k_places, bounds, rows, tiles)[:, 0], axis=0)
    numbers = jnp.arange(tiles.count, dtype=jnp.int32)
    high = jnp.max(jnp.where(needed, numbers + 1, 0))
    return jnp.minimum(jnp.min(jnp.where(needed, numbers, tiles.count)), high), high


def needed_tiles(
    q_places: Int[Array, "batch 2 rows"],
    k_places: Int[Array, "batch 2 columns"],
    bounds: Bounds,
    rows: Tiles,
    columns: Tiles,
) -> Bool[Array, "batch row_tiles column_tiles"]:
    """Whether a query of a tile may see a key of another; both are whole tiles."""
    batch = k_places.shape[0]
    low_k, high_k = _extent(k_places.reshape(batch, 2, 1, columns.count, columns.size))
    low_q, high_q = _extent(q_places.reshape(batch, 2, rows.count, 1, rows.size))
    near = (low_q - high_k)[:, POSITION] <= bounds[0]
    near &= (low_k - high_q)[:, POSITION] <= bounds[1]
    return near & ((low_q <= high_k) & (low_k <= high_q))[:, SEGMENT]


def _extent(places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and largest position and segment over the last dim, padding left out."""
    real = places[:, SEGMENT : SEGMENT + 1] != PADDING
    low, high = jnp.where(real, places, FAR), jnp.where(real, places, -FAR)
    return jnp.min(low, axis=-1), jnp.max(high, axis=-1)


@dataclasses.dataclass(frozen=True)
class XlaBlocks:
    """The memory-bounded kernel; sizes in tokens, they change nothing but speed and memory."""

    queries: int = 256
    keys: int = 512

    def forward(self, block: Block, form: ScoreForm, running: Partial) -> Partial:
        """See `BlockKernel.forward`."""
        rows, columns = self._tiles(block)
        queries, keys = _pad_queries(block.queries, rows), _pad_keys(block.keys, columns)

        def tile(i: jax.Array, whole: Partial) -> Partial:
            row = Block(_cut_queries(queries, rows, i), keys, block.bounds)
            before = Partial(rows.cut(whole.output, i, 1), rows.cut(whole.lse, i, 1))
            after = merge(before, _tile_forward(row, columns, form))
            return Partial(rows.put(whole.output, after.output, i), rows.put(whole.lse, after.lse, i))

        padded = Partial(rows.pad(running.output, 1), rows.pad(running.lse, 1))
        whole = lax.fori_loop(0, rows.count, tile, padded)
        return Partial(rows.unpad(whole.output), rows.unpad(whole.lse))

    def backward(
        self, block: Block, form: ScoreForm, gradient: OutputGradient, dq: Float[Array, "..."]
    ) -> Gradients:
        """See `BlockKernel.backward`."""
        rows, columns = self._tiles(block)
        queries, keys = _pad_queries(block.queries, rows), _pad_keys(block.keys, columns)
        gradient = jax.tree.map(lambda x: rows.pad(x, 1), gradient)

        def tile(i: jax.Array, whole: Gradients) -> Gradients:
            part = jax.tree.map(lambda x: rows.cut(x, i, 1), gradient)
            row = _cut_queries(queries, rows, i)

            def column(j: jax.Array, carry: Gradients) -> Gradients:
                inner = Block(row, _cut_keys(keys, columns, j), block.bounds)
                dq, dk, dv = block_gradients(inner, form, part)
                dk, dv = dk + columns.cut(carry[1], j, 1), dv + columns.cut(carry[2], j, 1)
                return carry[0] + dq, columns.put(carry[1], dk, j), columns.put(carry[2], dv, j)

            low, high = needed_range(row.places, keys.places, block.bounds, columns)
            dq, dk, dv = lax.fori_loop(low, high, column, (rows.cut(whole[0], i, 1), *whole[1:]))
            return rows.put(whole[0], dq, i), dk, dv

        nothing = tuple(jnp.zeros_like(x, dtype=jnp.float32) for x in (keys.k, keys.v))
        dq, dk, dv = lax.fori_loop(0, rows.count, tile, (rows.pad(dq, 1), *nothing))
        return rows.unpad(dq), columns.unpad(dk), columns.unpad(dv)

    def _tiles(self, block: Block) -> tuple[Tiles, Tiles]:
        """Of queries and of keys."""
        return (
            Tiles.of(block.queries.q.shape[1], self.queries),
            Tiles.of(block.keys.k.shape[1], self.keys),
        )


def _pad_queries(queries: Queries, tiles: Tiles) -> Queries:
    return Queries(tiles.pad(queries.q, 1), tiles.pad(queries.places, 2, PADDING))


def _pad_keys(keys: Keys, tiles: Tiles) -> Keys:
    return Keys(tiles.pad(keys.k, 1), tiles.pad(keys.v, 1), tiles.pad(keys.places, 2, PADDING))


def _cut_queries(queries: Queries, tiles: Tiles, i: jax.Array) -> Queries:
    return Queries(tiles.cut(queries.q, i, 1), tiles.cut(queries.places, i, 2))


def _cut_keys(keys: Keys, tiles: Tiles, j: jax.Array) -> Keys:
    return Keys(tiles.cut(keys.k, j, 1), tiles.cut(keys.v, j, 1), tiles.cut(keys.places, j, 2))


def _tile_forward(block: Block, tiles: Tiles, form: ScoreForm) -> Partial:
    """One tile of queries over all tiles of keys that it needs."""
    queries, keys, bounds = block.queries, block.keys, block.bounds
    q = by_kv_head(without_padding(queries.places, queries.q), keys.k.shape[2])

    def absorb(j: jax.Array, running: _Running) -> _Running:
        tile = _cut_keys(keys, tiles, j)
        mask = visible(queries.places, tile.places, bounds)
        k, v = seen_alone(tile.k, mask), seen_alone(tile.v, mask)
        scores = jnp.where(row_mask(mask), block_scores(q, k, form)[0], -jnp.inf)
        peak = jnp.maximum(running.peak, jnp.max(scores, axis=-1))
        base = jnp.where(is_empty(peak), 0.0, peak)  # rows that have seen nothing yet stay at −inf
        weights = jnp.exp(scores - base[..., None])
        fade = jnp.exp(running.peak - base)
        output = product("bktgs,bskd->bktgd", weights.astype(v.dtype), v)
        total = running.total * fade + jnp.sum(weights, axis=-1)
        return _Running(peak, total, running.output * fade[..., None] + output)

    low, high = needed_range(queries.places, keys.places, bounds, tiles)
    nothing = jnp.zeros_like(q, dtype=jnp.float32)
    start = _Running(nothing[..., 0] - jnp.inf, nothing[..., 0], nothing)
    done = lax.fori_loop(low, high, absorb, start)
    return normalised(done.output, done.total, done.peak)
