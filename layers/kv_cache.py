"""Keys and values of the tokens seen so far.

A pytree passed in and out of every step, donated, written in place: stacked it rides in the layer loop's
carry (as scan inputs and outputs it would exist twice), unrolled it is a tuple of one array a layer.
Position p of row b stands at time index p, so a token's absolute position is its address.

Data flow: prefill writes chunks at one start for all rows; decode writes one token a row at each row's own
position; `Segment` is what attention reads.

Worked example: 8 layers, 4 slots, multiquery with 1 kv head of 64 and 512 positions in float32 take
2 · 8 · 4 · 1 · 512 · 64 · 4 bytes = 8 MiB.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Leaf = jax.Array | tuple[jax.Array, ...]


@flax.struct.dataclass
class Segment:
    """A run of keys and values that attention reads, of one layer.

    k, v are `[batch, kv_heads, keys, qkv]`, or `[layers, …]` with `layer` set: blocks are then cut out
    of the stack directly. `start` is the absolute position of key 0, `length` counts the valid keys.
    """

    k: jax.Array
    v: jax.Array
    start: Int[Array, " batch"]
    length: Int[Array, " batch"]
    layer: jax.Array | None = None

    @property
    def keys(self) -> int:
        """Keys the arrays hold, valid or not."""
        return self.k.shape[-2]

    def block(self, first: int | jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """k and v of `size` keys from index `first`, each `[batch, kv_heads, size, qkv]`."""
        return _cut(self.k, self.layer, first, size), _cut(self.v, self.layer, first, size)


def _cut(leaf: jax.Array, layer: jax.Array | None, first: int | jax.Array, size: int) -> jax.Array:
    if layer is None:
        return jax.lax.dynamic_slice_in_dim(leaf, first, size, axis=2)
    _, batch, kv_heads, _, qkv = leaf.shape
    zero = jnp.zeros_like(layer)
    first = jnp.asarray(first, layer.dtype)
    cut = jax.lax.dynamic_slice(leaf, (layer, zero, zero, first, zero), (1, batch, kv_heads, size, qkv))
    return cut[0]


def _write(leaf: Leaf, layer: int | jax.Array, new: jax.Array, start: jax.Array) -> Leaf:
    """Writes `[batch, time, kv_heads, qkv]` at time index `start` (one for all rows, or one a row)."""
    if isinstance(leaf, tuple):
        return tuple(_write_layer(a, (), new, start) if i == layer else a for i, a in enumerate(leaf))
    return _write_layer(leaf, (layer,), new, start)


def _write_layer(leaf: jax.Array, lead: tuple[jax.Array, ...], new: jax.Array, start: jax.Array) -> jax.Array:
    batch, time = new.shape[:2]
    new = new.astype(leaf.dtype)
    if start.ndim == 0:
        update = jnp.swapaxes(new, 1, 2)[(None,) * len(lead)]  # [batch, kv_heads, time, qkv]
        return jax.lax.dynamic_update_slice(leaf, update, (*lead, 0, 0, start, 0))
    rows = jnp.arange(batch, dtype=start.dtype)[:, None]
    times = start[:, None] + jnp.arange(time, dtype=start.dtype)[None, :]
    # The slice between the two index arrays puts their dims first: [batch, time, kv_heads, qkv].
    return leaf.at[(*lead, rows, slice(None), times)].set(new, mode="drop")


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

    The fields are `Any`: a pytree also carries shapes, specs and shardings.
    """

    k: Any
    v: Any

    @classmethod
    def zeros(cls, shape: CacheShape, dtype: jnp.dtype, *, stacked: bool) -> "KVCache":
        """An empty cache."""
        row = (shape.batch, shape.kv_heads, shape.time, shape.qkv)
        if stacked:
            return cls(jnp.zeros((shape.layers, *row), dtype), jnp.zeros((shape.layers, *row), dtype))
        k, v = (tuple(jnp.zeros(row, dtype) for _ in range(shape.layers)) for _ in range(2))
        return cls(k, v)

    @property
    def time(self) -> int:
        """Positions a row can hold."""
        return (self.k[0] if isinstance(self.k, tuple) else self.k).shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((self.k, self.v)))

    @jax.named_scope("attention")
    def write(
        self,
        layer: int | jax.Array,
        k: Float[Array, "batch time kv_heads qkv"],
        v: Float[Array, "batch time kv_heads qkv"],
        start: Int[Array, "*rows"],
    ) -> "KVCache":
        """This cache with a layer's new keys and values at `start`, a scalar or one index a row.

        The caller keeps `start + time` within the cache: a scalar start beyond it would move the write.
        """
        return KVCache(_write(self.k, layer, k, start), _write(self.v, layer, v, start))

    def segment(self, layer: int | jax.Array, length: Int[Array, " batch"]) -> Segment:
        """A layer's first `length` positions of every row."""
        start = jnp.zeros_like(length)
        if isinstance(self.k, tuple):
            return Segment(self.k[layer], self.v[layer], start, length)
        return Segment(self.k, self.v, start, length, jnp.asarray(layer, jnp.int32))
