"""Laws of a cache dealt over chips: one cache's attention, one writer of a token, rings that lose no key."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attention import AttentionBlocks, attend, attend_reference
from layers.cache_ring import attend_by_ring
from layers.kv_cache import CacheShape, KVCache
from layers.ring_attention import vary_alike
from layers.striped_cache import Striping, dealt, gathered, striping, write_index
from tests.ring_runs import grid

AXES, CHIPS = ("y", "x"), 8  # of a mesh 2,4, the minor axis first
SHAPE = CacheShape(layers=2, batch=3, kv_heads=2, time=40, qkv=8)


def filled(rng: np.random.Generator, dtype: str = "float32", *, stacked: bool) -> KVCache:
    zeros = KVCache.zeros(SHAPE, jnp.dtype(dtype), stacked=stacked)

    def some(leaf: jax.Array) -> jax.Array:
        integers = leaf.dtype == jnp.int8
        values = rng.integers(-9, 9, leaf.shape) if integers else np.abs(rng.normal(size=leaf.shape))
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(some, zeros)


def time_dim(leaf: jax.Array, *, stacked: bool) -> int:
    return 3 if stacked else 2


def spread(cache: KVCache, *, stacked: bool) -> KVCache:
    return jax.tree.map(lambda leaf: dealt(leaf, CHIPS, time_dim(leaf, stacked=stacked)), cache)


def specs(cache: KVCache, *, stacked: bool) -> KVCache:
    return jax.tree.map(lambda leaf: P(*(None,) * time_dim(leaf, stacked=stacked), AXES), cache)


def test_places_are_dealt_like_cards() -> None:
    whole = jnp.arange(24, dtype=jnp.int32)
    chips = dealt(whole, CHIPS, 0).reshape(CHIPS, 3)
    assert np.array_equal(gathered(chips.reshape(-1), CHIPS, 0), whole)
    for chip in range(CHIPS):
        mine = Striping(jnp.int32(chip), CHIPS)
        assert np.array_equal(chips[chip], mine.place(jnp.arange(3, dtype=jnp.int32)))
        below = jnp.arange(25, dtype=jnp.int32)
        assert np.array_equal(mine.held(below), [int(np.sum(chips[chip] < n)) for n in below])
        found = mine.index(whole, 99)
        assert np.array_equal(found, [list(chips[chip]).index(n) if n in chips[chip] else 99 for n in whole])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (None, 2.0)])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_joined_it_is_attention_over_one_cache(
    dtype: str, stacked: bool, window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    cache = filled(rng, dtype, stacked=stacked)
    q = jnp.asarray(rng.normal(size=(3, 2, 4, 8)), jnp.float32)
    lengths = jnp.asarray([2, 17, 40], jnp.int32)
    positions = lengths[:, None] - jnp.asarray([[2, 1]], jnp.int32)

    def chip(cache: KVCache, q: jax.Array, lengths: jax.Array) -> jax.Array:
        segment = cache.segment(1, lengths, stripes=striping(AXES))
        blocks = AttentionBlocks(queries=2, keys=3)
        (q,) = vary_alike(AXES, q)
        return attend(q, [segment], positions, window=window, cap=cap, blocks=blocks, axes=AXES)

    lies = specs(cache, stacked=stacked)
    sharded = jax.shard_map(chip, mesh=grid(2, 4), in_specs=(lies, P(), P()), out_specs=P())
    expected = attend_reference(q, [cache.segment(1, lengths)], positions, window=window, cap=cap)
    program = jax.jit(sharded).lower(spread(cache, stacked=stacked), q, lengths).compile()
    found = program(spread(cache, stacked=stacked), q, lengths)
    assert np.allclose(found, expected, atol=2e-6 * float(jnp.max(jnp.abs(expected))))
    assert len(re.findall(r" all-reduce(?:-start)?\(", program.as_text())) == 2
    assert not re.search("all-gather|all-to-all|collective-permute", program.as_text())


def test_nan_beyond_the_length_reaches_nothing(rng: np.random.Generator) -> None:
    cache, lengths = filled(rng, stacked=True), jnp.asarray([2, 17, 40], jnp.int32)
    q = jnp.asarray(rng.normal(size=(3, 2, 4, 8)), jnp.float32)
    positions = lengths[:, None] - jnp.asarray([[2, 1]], jnp.int32)
    beyond = jnp.arange(40)[None, None, :, None] >= lengths[:, None, None, None]
    poisoned = jax.tree.map(lambda leaf: jnp.where(beyond, jnp.nan, leaf), cache)

    def joined(cache: KVCache, q: jax.Array) -> jax.Array:
        (q,) = vary_alike(AXES, q)
        return attend(q, [cache.segment(1, lengths, stripes=striping(AXES))], positions, axes=AXES)

    def by_ring(cache: KVCache, q: jax.Array) -> jax.Array:
        mine = jnp.repeat(q, CHIPS, axis=1)  # every chip takes both queries, as one of 16
        segments = [cache.segment(1, lengths, stripes=striping(AXES))]
        return attend_by_ring(mine[:, ::CHIPS], segments, positions, AXES)

    for function, out in ((joined, P()), (by_ring, P(None, AXES))):
        program = jax.jit(
            jax.shard_map(
                function, mesh=grid(2, 4), in_specs=(specs(cache, stacked=True), P()), out_specs=out
            )
        )
        clean, found = (program(spread(c, stacked=True), q) for c in (cache, poisoned))
        assert np.all(np.isfinite(found))
        assert np.array_equal(found, clean)


def test_rows_without_keys_give_zero(rng: np.random.Generator) -> None:
    cache, none = filled(rng, stacked=True), jnp.zeros(3, jnp.int32)

    def chip(cache: KVCache, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        segments, at = [cache.segment(0, none, stripes=striping(AXES))], jnp.zeros((3, 1), jnp.int32)
        (varying,) = vary_alike(AXES, q)
        return attend(varying, segments, at, axes=AXES), attend_by_ring(q, segments, at, AXES)

    sharded = jax.shard_map(
        chip, mesh=grid(2, 4), in_specs=(specs(cache, stacked=True), P()), out_specs=(P(), P(None, AXES))
    )
    for output in jax.jit(sharded)(spread(cache, stacked=True), jnp.ones((3, 1, 4, 8))):
        assert np.all(output == 0)


@pytest.mark.parametrize(
    ("start", "window", "cap"), [(0, None, None), (16, None, None), (16, 5, None), (24, None, 2.0)]
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_chunk_goes_round_the_blocks_that_it_needs(
    dtype: str, start: int, window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    """Chunks of 16 tokens, two a chip, over a cache of five a chip: the last block is moved back."""
    cache, chunk = filled(rng, dtype, stacked=True), 16
    q = jnp.asarray(rng.normal(size=(3, chunk, 4, 8)), jnp.float32)
    lengths = jnp.full(3, start + chunk, jnp.int32)
    positions = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32)[None, :], (3, chunk))

    def chip(cache: KVCache, q: jax.Array, positions: jax.Array) -> jax.Array:
        segment = cache.segment(jnp.int32(1), lengths, stripes=striping(AXES))
        return attend_by_ring(q, [segment], positions, AXES, window=window, cap=cap)

    times = P(None, AXES)
    sharded = jax.jit(
        jax.shard_map(
            chip, mesh=grid(2, 4), in_specs=(specs(cache, stacked=True), times, times), out_specs=times
        )
    )
    args = spread(cache, stacked=True), dealt(q, CHIPS, 1), dealt(positions, CHIPS, 1)
    found = gathered(sharded(*args), CHIPS, 1)
    expected = attend_reference(q, [cache.segment(1, lengths)], positions, window=window, cap=cap)
    assert np.allclose(found, expected, atol=2e-6 * float(jnp.max(jnp.abs(expected))))
    program = sharded.lower(*args).compile().as_text()
    assert not re.search(r" all-gather(?:-start)?\(| all-to-all\(", program)
    assert re.search(r" collective-permute(?:-start)?\(", program)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_token_is_written_once_at_its_position(stacked: bool, rng: np.random.Generator) -> None:
    cache = filled(rng, stacked=stacked)
    k, v = (jnp.asarray(rng.normal(size=(3, 1, 2, 8)), jnp.float32) for _ in range(2))
    at, layer = jnp.asarray([0, 14, 39], jnp.int32), jnp.int32(1) if stacked else 1

    def chip(cache: KVCache, k: jax.Array, v: jax.Array, at: jax.Array) -> KVCache:
        index = write_index(at, 1, striping(AXES), split=False, end=cache.time)
        return cache.write(layer, k, v, index)

    lies = specs(cache, stacked=stacked)
    sharded = jax.shard_map(chip, mesh=grid(2, 4), in_specs=(lies, P(), P(), P()), out_specs=lies)
    found = jax.jit(sharded)(spread(cache, stacked=stacked), k, v, at)
    expected = spread(cache.write(layer, k, v, at), stacked=stacked)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def test_what_a_dealt_cache_cannot_take_is_refused() -> None:
    stripes = Striping(jnp.int32(0), CHIPS)
    of_rows, of_all = jnp.zeros(3, jnp.int32), jnp.int32(0)
    for start, time, split in ((of_rows, 2, False), (of_all, 1, False), (of_rows, 8, True)):
        with pytest.raises(ValueError, match="one a row at its own index"):
            write_index(start, time, stripes, split=split, end=5)
