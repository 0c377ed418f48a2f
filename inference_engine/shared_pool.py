"""The pool of prefixes that slots share: how it is made, where it lies, how a prefix gets into it.

Prefill and decoding read the pool, each in its own layout: where the two split kv heads, and deal positions,
over the same axes one copy serves both, else there are two.

Data flow: prefill of a prefix → `hold_step` → `SharedPool` → `prefill_view`, `decode_view` → forward passes.

Worked example: room for 2 entries of 512 positions of the default checkpoint, in float32 on 2,2,2 with
AXES_YZX: 2 · 512 · 2 · 6 · 32 · 4 bytes = 1.6 MB, on each of the eight chips.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState, Prefix, SharedPool
from inference_engine.model import Model
from layers.cache_insert import insert_row
from layers.kv_cache import KVCache
from layers.shared_prefix import SharedPrefixes


def empty_pool(prefill: Model, decode: Model, config: EngineConfig, *, stacked: bool) -> SharedPool:
    """A pool that holds nothing."""
    empty = functools.partial(_empty, config=config, stacked=stacked)
    second = None if _alike(prefill, decode) else empty(prefill)
    return SharedPool(empty(decode), second, jnp.zeros(config.shared_prefixes, jnp.int32))


def _empty(model: Model, config: EngineConfig, *, stacked: bool) -> tuple[KVCache, ...]:
    shapes = [model.shared_shape(*size) for size in config.shared_sizes]
    return tuple(KVCache.zeros(shape, jnp.dtype(config.cache_dtype), stacked=stacked) for shape in shapes)


def _alike(prefill: Model, decode: Model) -> bool:
    if prefill.attention is None or decode.attention is None:
        return True
    of_prefill, of_decode = prefill.attention, decode.attention
    return (of_prefill.heads, of_prefill.context) == (of_decode.heads, of_decode.context)


def pool_specs(prefill: Model, decode: Model, pool: SharedPool) -> SharedPool:
    """How the pool lies on the mesh."""
    second = None if pool.prefill_caches is None else tuple(map(prefill.shared_specs, pool.prefill_caches))
    return SharedPool(tuple(map(decode.shared_specs, pool.caches)), second, P())


def pool_bytes(prefill: Model, decode: Model, config: EngineConfig) -> int:
    """Bytes of the pool over all chips, each copy counted."""
    pool = jax.eval_shape(functools.partial(empty_pool, prefill, decode, config, stacked=True))
    first = sum(cache.nbytes for cache in pool.caches) * decode.batch_shards
    return first + sum(cache.nbytes for cache in pool.prefill_caches or ()) * prefill.batch_shards


def hold_step(
    prefill: Model,
    decode: Model,
    room: int,
    pool: SharedPool,
    prefix: Prefix,
    place: jax.Array,
    entry: jax.Array,
    start: jax.Array,
) -> SharedPool:
    """Puts a prefix's first row, whose first key is at position `start`, into an entry.

    `room` and `place` say where the entry is among the caches.
    """

    def put(model: Model, caches: tuple[KVCache, ...]) -> tuple[KVCache, ...]:
        written = insert_row(
            caches[room],
            prefix.cache,
            jnp.zeros_like(place),
            place,
            target=None if model.attention is None else model.attention.whole_rows,
            source=prefill.attention,
            kv_heads=model.padded_kv_heads,
        )
        return (*caches[:room], written, *caches[room + 1 :])

    second = None if pool.prefill_caches is None else put(prefill, pool.prefill_caches)
    return SharedPool(put(decode, pool.caches), second, pool.starts.at[entry].set(start))


def prefill_view(pool: SharedPool, lengths: jax.Array) -> SharedPrefixes:
    """What rows with these lengths `[rows, entries]` see in prefill."""
    caches = pool.caches if pool.prefill_caches is None else pool.prefill_caches
    return SharedPrefixes(caches, pool.starts, lengths)


def decode_view(pool: SharedPool, state: DecodeState) -> SharedPrefixes:
    """What the slots see in decoding."""
    return SharedPrefixes(pool.caches, pool.starts, state.shared_lengths)
