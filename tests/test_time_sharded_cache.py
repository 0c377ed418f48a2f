"""Laws of a cache spread over chips by position: one cache's attention, one writer of a token."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attention import AttentionBlocks, attend_reference
from layers.kv_cache import CacheShape, KVCache
from layers.time_sharded_cache import attend_time_sharded_cache, local_segment, write_token
from tests.ring_runs import grid

AXES = ("y", "x")  # 8 chips of a mesh 2,4, the minor axis first
SHAPE = CacheShape(layers=2, batch=3, kv_heads=2, time=40, qkv=8)
SHARDED = P(None, None, None, AXES)


def filled(rng: np.random.Generator, *, stacked: bool) -> KVCache:
    zeros = KVCache.zeros(SHAPE, jnp.dtype("float32"), stacked=stacked)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), zeros)


def specs(cache: KVCache) -> KVCache:
    return jax.tree.map(lambda leaf: P(*(None,) * (leaf.ndim - 2), AXES), cache)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, None), (None, 2.0)])
@pytest.mark.parametrize("stacked", [True, False])
def test_it_is_attention_over_one_cache(
    stacked: bool, window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    cache = filled(rng, stacked=stacked)
    q = jnp.asarray(rng.normal(size=(3, 2, 4, 8)), jnp.float32)
    lengths = jnp.asarray([2, 17, 40], jnp.int32)  # one chip of eight, four, all
    positions = lengths[:, None] - jnp.asarray([[2, 1]], jnp.int32)

    def chip(cache: KVCache, q: jax.Array, lengths: jax.Array) -> jax.Array:
        segment = local_segment(cache, 1, lengths, AXES)
        blocks = AttentionBlocks(queries=2, keys=3)
        return attend_time_sharded_cache(q, segment, positions, AXES, window=window, cap=cap, blocks=blocks)

    sharded = jax.shard_map(chip, mesh=grid(2, 4), in_specs=(specs(cache), P(), P()), out_specs=P())
    whole = cache.segment(1, lengths)
    expected = attend_reference(q, [whole], positions, window=window, cap=cap)
    program = jax.jit(sharded).lower(cache, q, lengths).compile()
    assert np.allclose(program(cache, q, lengths), expected, atol=2e-6)
    assert len(re.findall(r" all-reduce(?:-start)?\(", program.as_text())) == 2
    assert not re.search("all-gather|all-to-all|collective-permute", program.as_text())
    beyond = jnp.arange(40)[None, None, :, None] >= lengths[:, None, None, None]
    poisoned = jax.tree.map(lambda leaf: jnp.where(beyond, jnp.nan, leaf), cache)
    assert np.array_equal(program(poisoned, q, lengths), program(cache, q, lengths))


def test_rows_without_keys_give_zero(rng: np.random.Generator) -> None:
    cache = filled(rng, stacked=True)

    def chip(cache: KVCache, q: jax.Array) -> jax.Array:
        segment = local_segment(cache, 0, jnp.zeros(3, jnp.int32), AXES)
        return attend_time_sharded_cache(q, segment, jnp.zeros((3, 1), jnp.int32), AXES)

    sharded = jax.shard_map(chip, mesh=grid(2, 4), in_specs=(specs(cache), P()), out_specs=P())
    assert np.all(jax.jit(sharded)(cache, jnp.ones((3, 1, 4, 8))) == 0)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_token_is_written_once_at_its_position(stacked: bool, rng: np.random.Generator) -> None:
    cache = filled(rng, stacked=stacked)
    k, v = (jnp.asarray(rng.normal(size=(3, 1, 2, 8)), jnp.float32) for _ in range(2))
    at, layer = jnp.asarray([0, 14, 39], jnp.int32), jnp.int32(1) if stacked else 1
    sharded = jax.shard_map(
        lambda cache, k, v, at: write_token(cache, layer, k, v, at, AXES),
        mesh=grid(2, 4),
        in_specs=(specs(cache), P(), P(), P()),
        out_specs=specs(cache),
    )
    found, expected = jax.jit(sharded)(cache, k, v, at), cache.write(layer, k, v, at)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def test_decoding_over_a_spread_cache_gives_one_caches_outputs(rng: np.random.Generator) -> None:
    """Token by token across the borders of four chips."""
    zeros = KVCache.zeros(SHAPE, jnp.dtype("float32"), stacked=True)
    tokens = [jnp.asarray(rng.normal(size=(22, 3, 1, heads, 8)), jnp.float32) for heads in (4, 2, 2)]

    def step(cache: KVCache, at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        position = jnp.full(3, at, jnp.int32)
        cache = write_token(cache, jnp.int32(0), k, v, position, AXES)
        segment = local_segment(cache, 0, position + 1, AXES)
        return cache, attend_time_sharded_cache(q, segment, position[:, None], AXES)

    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=grid(2, 4),
            in_specs=(specs(zeros), P(), P(), P(), P()),
            out_specs=(specs(zeros), P()),
        )
    )
    spread, whole = zeros, zeros
    for at in range(22):
        q, k, v = (x[at] for x in tokens)
        spread, output = sharded(spread, jnp.int32(at), q, k, v)
        position = jnp.full(3, at, jnp.int32)
        whole = whole.write(jnp.int32(0), k, v, position)
        expected = attend_reference(q, [whole.segment(0, position + 1)], position[:, None])
        assert np.allclose(output, expected, atol=2e-6), at
