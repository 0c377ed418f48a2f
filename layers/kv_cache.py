"""Keys and values of the tokens seen so far.

A pytree passed in and out of every step, donated, written in place: stacked it rides in the layer loop's
carry (as scan inputs and outputs it would exist twice), unrolled it is a tuple of one array a layer.
A row's p-th own token stands at time index p, or where positions are dealt over P chips (striped_cache.py)
at index p // P of chip p mod P: its place is its address.

Data flow: prefill writes chunks at one start for all rows; decode writes one token a row at each row's own
position; `Segment` is what attention reads, block by block. The leaves are arrays, or int8 pairs
(kv_quantization.py), which are written and read by the same paths.

Worked example: 8 layers, 4 slots, multiquery with 1 kv head of 64 and 512 positions in float32 take
2 · 8 · 4 · 1 · 512 · 64 · 4 bytes = 8 MiB.
"""

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from layers.kv_quantization import QuantizedKV, quantize_kv
from layers.striped_cache import Striping

Entry = jax.Array | QuantizedKV
"""Keys or values of one layer, or of a stack of them."""


TOKENS_OF_A_TILE = 16
"""What a TPU holds of a bfloat16 array's second-minor dim in one tile."""


class KeyBlock(NamedTuple):
    """Some keys as stored: k, v `[batch, kv_heads, keys, qkv]`, and of int8 ones the scales without qkv."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


@flax.struct.dataclass
class Segment:
    """A run of keys and values that attention reads, of one layer.

    k, v are `[batch, kv_heads, keys, qkv]`, or `[layers, …]` with `layer` set: blocks are then cut out
    of the stack directly. `start` is the absolute position of key 0, `length` counts the valid keys.
    With `key_rates` `[qkv]` the key at position p has yet to be multiplied by exp(p · key_rates).
    With `row` set, that one row of the arrays is read by all rows of queries, each with a length of its own.
    With `stripes` set, keys are dealt over chips and the arrays hold this chip's; start and length are still
    those of the whole run.
    """

    k: Entry
    v: Entry
    start: Int[Array, " batch"]
    length: Int[Array, " batch"]
    layer: jax.Array | None = None
    key_rates: jax.Array | None = None
    stripes: Striping | None = None
    row: int | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def keys(self) -> int:
        """Keys the arrays hold, valid or not."""
        return self.k.shape[-2]

    def places(self, first: int | jax.Array, size: int) -> Int[Array, " keys"]:
        """Where in the run the keys from index `first` on stand; key 0 of the run is at place 0."""
        index = first + jnp.arange(size, dtype=jnp.int32)
        return index if self.stripes is None else self.stripes.place(index)

    def held(self, below: Int[Array, "*any"]) -> Int[Array, "*any"]:
        """How many of the places below a number the arrays hold."""
        return below if self.stripes is None else self.stripes.held(below)

    def stretched(self, k: jax.Array, places: Int[Array, " keys"]) -> jax.Array:
        """Keys `[batch, kv_heads, keys, qkv]` of these places, with what is left to do done in float32."""
        if self.key_rates is None:
            return k
        positions = (self.start[: len(k), None] + places[None, :]).astype(jnp.float32)
        rates = self.key_rates.reshape(1, 1, 1, -1)
        return k.astype(jnp.float32) * jnp.exp(positions[:, None, :, None] * rates)

    def block(self, first: int | jax.Array, size: int) -> KeyBlock:
        """`size` keys from index `first`; with `row` set their batch is 1."""
        cut = functools.partial(_cut, layer=self.layer, row=self.row, first=first, size=size)
        k, v = (jax.tree.map(cut, entry) for entry in (self.k, self.v))
        if isinstance(k, QuantizedKV):
            return KeyBlock(k.qvalue, v.qvalue, k.scale, v.scale)
        return KeyBlock(k, v)


def _cut(
    leaf: jax.Array, layer: jax.Array | None, row: int | None, first: int | jax.Array, size: int
) -> jax.Array:
    """Keys of `[batch, kv_heads, keys, …]`, of all rows or one, or of one layer of a stack of those."""
    lead = 0 if layer is None else 1
    places: list[int | jax.Array] = [0] * leaf.ndim
    sizes = list(leaf.shape)
    if layer is not None:
        places[0], sizes[0] = layer, 1
    if row is not None:
        places[lead], sizes[lead] = row, 1
    places[lead + 2], sizes[lead + 2] = first, size
    cut = jax.lax.dynamic_slice(leaf, [jnp.asarray(place, jnp.int32) for place in places], sizes)
    return cut if layer is None else cut[0]


def _write(entry: Any, layer: int | jax.Array, new: jax.Array, start: jax.Array) -> Any:
    """Writes `[batch, time, kv_heads, qkv]` at time index `start` (one for all rows, or one a row)."""
    if isinstance(entry, tuple):
        return tuple(_write_entry(a, (), new, start) if i == layer else a for i, a in enumerate(entry))
    return _write_entry(entry, (layer,), new, start)


def _write_entry(entry: Entry, lead: tuple[jax.Array, ...], new: jax.Array, start: jax.Array) -> Entry:
    if isinstance(entry, QuantizedKV):
        pair = quantize_kv(new)
        return jax.tree.map(lambda leaf, part: _write_layer(leaf, lead, part, start), entry, pair)
    return _write_layer(entry, lead, new, start)


def _write_layer(leaf: jax.Array, lead: tuple[jax.Array, ...], new: jax.Array, start: jax.Array) -> jax.Array:
    batch, time = new.shape[:2]
    new = new.astype(leaf.dtype)
    if start.ndim == 0:
        update = jnp.swapaxes(new, 1, 2)[(None,) * len(lead)]  # [batch, kv_heads, time, …]
        places = (*lead, 0, 0, start, 0)[: leaf.ndim]
        return jax.lax.dynamic_update_slice(leaf, update, places)
    if batch == time == 1:
        return _write_token(leaf, lead, new, start[0])
    rows = jnp.arange(batch, dtype=start.dtype)[:, None]
    times = start[:, None] + jnp.arange(time, dtype=start.dtype)[None, :]
    # The slice between the two index arrays puts their dims first: [batch, time, kv_heads, …].
    return leaf.at[(*lead, rows, slice(None), times)].set(new, mode="drop", wrap_negative_indices=False)


def _write_token(leaf: jax.Array, lead: tuple[jax.Array, ...], new: jax.Array, index: jax.Array) -> jax.Array:
    """One token `[1, 1, kv_heads, …]` of a cache of one row, together with its neighbours.

    Written alone it would have the TPU compiler keep the cache with one token a tile, and copy all of it for
    attention to read, in every layer.
    """
    dim = len(lead) + 2
    count = min(TOKENS_OF_A_TILE, leaf.shape[dim])
    first = jnp.clip(index // count * count, 0, leaf.shape[dim] - count)
    places = [jnp.asarray(place, jnp.int32) for place in (*lead, 0, 0, first, 0)][: leaf.ndim]
    sizes = (*(1,) * len(lead), *leaf.shape[len(lead) : dim], count, *leaf.shape[dim + 1 :])
    old = jax.lax.dynamic_slice(leaf, places, sizes)
    mine = first + jnp.arange(count, dtype=jnp.int32) == index  # nowhere for an index beyond the end
    mine = mine.reshape(-1, *(1,) * (leaf.ndim - dim - 1))
    update = jnp.swapaxes(new, 1, 2)[(None,) * len(lead)]  # [1, kv_heads, 1, …]
    return jax.lax.dynamic_update_slice(leaf, jnp.where(mine, update, old), places)


class CacheShape(NamedTuple):
    """Sizes of a whole cache; on a mesh rows are padded, and every chip's copy of a kv head counts."""

    layers: int
    batch: int
    kv_heads: int
    time: int
    qkv: int


@flax.struct.dataclass
class KVCache:
    """k and v, stacked `[layers, batch, kv_heads, time, qkv]` or a tuple of layers without that dim.

    Either is an array or a `QuantizedKV`, whose scales have no qkv. The fields are `Any`: a pytree also
    carries shapes, specs and shardings.
    """

    k: Any
    v: Any

    @classmethod
    def zeros(cls, shape: CacheShape, dtype: jnp.dtype, *, stacked: bool) -> "KVCache":
        """An empty cache; int8 has scales beside."""
        row = (shape.batch, shape.kv_heads, shape.time, shape.qkv)

        def entry(*size: int) -> Entry:
            values = jnp.zeros(size, dtype)
            return QuantizedKV(values, jnp.zeros(size[:-1], jnp.float32)) if dtype == jnp.int8 else values

        if stacked:
            return cls(entry(shape.layers, *row), entry(shape.layers, *row))
        k, v = (tuple(entry(*row) for _ in range(shape.layers)) for _ in range(2))
        return cls(k, v)

    @property
    def stacked(self) -> bool:
        """Whether the leaves have a leading layers dim."""
        return not isinstance(self.k, tuple)

    @property
    def quantized(self) -> bool:
        """Whether keys and values are int8."""
        return isinstance(self.k if self.stacked else self.k[0], QuantizedKV)

    @property
    def rows(self) -> int:
        """Sequences that these arrays hold."""
        return self.k.shape[1] if self.stacked else self.k[0].shape[0]

    @property
    def time(self) -> int:
        """Positions a row can hold."""
        return (self.k if self.stacked else self.k[0]).shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, scales included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((self.k, self.v)))

    @jax.named_scope("attention")
    def write(
        self,
        layer: int | jax.Array,
        k: Float[Array, "batch time kv_heads qkv"],
        v: Float[Array, "batch time kv_heads qkv"],
        start: Int[Array, "*rows"],
    ) -> "KVCache":
        """This cache with a layer's new keys and values from index `start` on, a scalar or one a row.

        The caller keeps `start + time` within the cache: a scalar start beyond it would move the write. What
        a start of a row puts beyond it is dropped.
        """
        return KVCache(_write(self.k, layer, k, start), _write(self.v, layer, v, start))

    def segment(
        self,
        layer: int | jax.Array,
        length: Int[Array, " batch"],
        key_rates: jax.Array | None = None,
        stripes: Striping | None = None,
    ) -> Segment:
        """A layer's first `length` positions of every row; for the others see `Segment`."""
        start = jnp.zeros_like(length)
        if not self.stacked:
            return Segment(self.k[layer], self.v[layer], start, length, None, key_rates, stripes)
        at = jnp.asarray(layer, jnp.int32)
        return Segment(self.k, self.v, start, length, at, key_rates, stripes)
