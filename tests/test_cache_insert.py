"""Laws of inserting: one row moves from the prefix into its slot and no other changes, on whatever chips."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attn_all_to_all import my_kv_heads
from layers.cache_insert import insert_row
from layers.head_order import KVFactors
from layers.kv_cache import CacheShape, KVCache
from layers.kv_quantization import quantize_kv
from layers.layout import AttentionAxes, AttnAllToAll, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.partitioning import cache_specs, shardings
from tests.test_layout_traffic import counted_everywhere

SLOTS, ROWS, LAYERS, TIME, QKV = 16, 8, 2, 3, 2
CUBE = MeshShape(2, 2, 2)
PLACES = {
    "heads": ShardingConfig().attention,
    "z": ShardingConfig(attn_all_to_all=AttnAllToAll.AXIS_Z).attention,
    "yz": ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZ).attention,
    "yzx": ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZX).attention,
    "gathered_x": ShardingConfig(Layout.WEIGHT_GATHERED_X).attention,
    "gathered_xy_z": ShardingConfig(Layout.WEIGHT_GATHERED_XY, AttnAllToAll.AXIS_Z).attention,
    "gathered_xyz": ShardingConfig(Layout.WEIGHT_GATHERED_XYZ).attention,
    "gathered_xy_time": ShardingConfig(Layout.WEIGHT_GATHERED_XY_TIME).attention,
}


def _whole(rows: int, kv_heads: int, seed: int) -> KVCache:
    """A cache as a model has it, every kv head once."""
    shape = (LAYERS, rows, kv_heads, TIME, QKV)
    rng = np.random.default_rng(seed)
    return KVCache(*(jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2)))


def _int8(cache: KVCache) -> KVCache:
    """The same numbers, rounded; every row and head has scales of its own."""
    return KVCache(quantize_kv(cache.k), quantize_kv(cache.v))


def _place(cache: KVCache, attention: AttentionAxes) -> KVCache:
    """The same over the mesh: each chip has its rows and its kv heads."""
    mesh = make_mesh(CUBE)
    rows = P(None, attention.batch or None)

    def mine(leaf: jax.Array) -> jax.Array:
        leaf = jax.lax.pcast(leaf, attention.heads, to="varying") if attention.heads else leaf
        return my_kv_heads(leaf, attention, 2)

    spec = jax.tree.leaves(cache_specs(cache, attention))[0]  # of values and of scales
    place = jax.shard_map(mine, mesh=mesh, in_specs=rows, out_specs=spec)
    return jax.tree.map(jax.jit(place), cache)


def _program(target: AttentionAxes, source: AttentionAxes, caches: tuple[KVCache, KVCache], kv_heads: int):  # noqa: ANN202
    mesh = make_mesh(CUBE)
    specs = cache_specs(caches[0], target), cache_specs(caches[1], source)

    def run(cache: KVCache, prefix: KVCache, row: jax.Array, slot: jax.Array) -> KVCache:
        return insert_row(cache, prefix, row, slot, target, source, kv_heads)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs[0], check_vma=True)
    return jax.jit(sharded, in_shardings=shardings(mesh, (*specs, P(), P())), donate_argnums=0)


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
@pytest.mark.parametrize(("target", "source"), list(itertools.product(list(PLACES)[:7], PLACES)))
def test_insert_moves_one_row_and_touches_no_other(target: str, source: str, kv_heads: int) -> None:
    _check_rows(target, source, kv_heads, (_whole(SLOTS, kv_heads, 0), _whole(ROWS, kv_heads, 1)))


@pytest.mark.parametrize(
    ("target", "source"), [("heads", "gathered_xyz"), ("yz", "heads"), ("yzx", "yzx"), ("z", "gathered_x")]
)
def test_insert_moves_int8_values_with_their_scales(target: str, source: str) -> None:
    _check_rows(target, source, 4, (_int8(_whole(SLOTS, 4, 0)), _int8(_whole(ROWS, 4, 1))))


def _check_rows(target: str, source: str, kv_heads: int, caches: tuple[KVCache, KVCache]) -> None:
    to, of = PLACES[target], PLACES[source]
    cache, prefix = caches
    placed = _place(cache, to), _place(prefix, of)
    program = _program(to, of, placed, kv_heads)
    wanted = jax.tree.map(np.array, cache)
    found = placed[0]
    for row, slot in [(0, 0), (5, 11), (7, 2), (3, 15)]:
        found = program(found, placed[1], np.int32(row), np.int32(slot))
        for whole, part in zip(jax.tree.leaves(wanted), jax.tree.leaves(prefix), strict=True):
            whole[:, slot] = np.asarray(part)[:, row]
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(_place(wanted, to)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(("target", "source"), list(itertools.product(list(PLACES)[:7], PLACES)))
def test_insert_moves_no_more_than_the_prefix_and_copies_no_cache(target: str, source: str) -> None:
    kv_heads = 4
    to, of = PLACES[target], PLACES[source]
    caches = _place(_whole(SLOTS, kv_heads, 0), to), _place(_whole(ROWS, kv_heads, 1), of)
    compiled = _program(to, of, caches, kv_heads).lower(*caches, np.int32(0), np.int32(0)).compile()
    moved = sum(counted_everywhere(compiled.as_text()).values())
    assert moved <= 2 * LAYERS * ROWS * kv_heads * TIME * QKV
    memory = compiled.memory_analysis()
    held = [sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(c)) for c in caches]
    assert memory.alias_size_in_bytes == held[0]
    row = KVFactors.of(kv_heads, *CUBE.sizes).on_a_chip(()) * TIME * QKV * LAYERS * 4
    assert memory.temp_size_in_bytes <= 8 * row + 1024


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
def test_one_device_inserts_a_row(dtype: str, *, stacked: bool) -> None:
    shapes = [CacheShape(LAYERS, rows, 2, TIME, QKV) for rows in (SLOTS, ROWS)]
    caches = [KVCache.zeros(shape, jnp.dtype(dtype), stacked=stacked) for shape in shapes]
    cache, prefix = (
        jax.tree.map(lambda leaf, n=n: leaf + jnp.asarray(n, leaf.dtype), each)
        for n, each in enumerate(caches)
    )
    found = jax.jit(insert_row)(cache, prefix, np.int32(3), np.int32(9))
    for leaf in jax.tree.leaves(found):
        rows = np.moveaxis(np.asarray(leaf), 1 if stacked else 0, 0)
        np.testing.assert_array_equal(rows[9], 1)
        np.testing.assert_array_equal(np.delete(rows, 9, axis=0), 0)
