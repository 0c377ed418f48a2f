"""Laws of inserting: one row moves from the prefix into its slot and no other changes, on whatever chips."""

import functools
import itertools
from collections.abc import Callable

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
from layers.layout import AttentionAxes, AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.partitioning import cache_specs, shardings
from layers.striped_cache import dealt
from tests.test_layout_traffic import counted_everywhere

SLOTS, ROWS, LAYERS, TIME, QKV = 16, 8, 2, 16, 2
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
    "context_xz": ShardingConfig(context=ContextSplit.XZ).attention,
    "z_context_y": ShardingConfig(attn_all_to_all=AttnAllToAll.AXIS_Z, context=ContextSplit.Y).attention,
}
TARGETS = [name for name in PLACES if "time" not in name]


@functools.cache
def _whole(rows: int, kv_heads: int, dtype: str = "float32") -> KVCache:
    """A cache as a model has it, every kv head once; each count of rows has numbers of its own.

    In int8 the same numbers, rounded: every row and head has scales of its own.
    """
    shape = (LAYERS, rows, kv_heads, TIME, QKV)
    rng = np.random.default_rng(rows)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))
    return KVCache(k, v) if dtype == "float32" else KVCache(quantize_kv(k), quantize_kv(v))


@functools.cache
def _placer(attention: AttentionAxes) -> Callable[[jax.Array], jax.Array]:
    """A leaf over the mesh: each chip has its rows and its kv heads. Compiled once a shape."""
    rows = P(None, attention.batch or None, None, attention.context or None)

    def mine(leaf: jax.Array) -> jax.Array:
        leaf = jax.lax.pcast(leaf, attention.heads, to="varying") if attention.heads else leaf
        return my_kv_heads(leaf, attention, 2)

    spec = jax.tree.leaves(cache_specs(_whole(ROWS, 1), attention))[0]  # of values and of scales
    place = jax.shard_map(mine, mesh=make_mesh(CUBE), in_specs=rows, out_specs=spec)
    return jax.jit(lambda leaf: place(dealt(leaf, CUBE.over(attention.context), 3)))


def _place(cache: KVCache, attention: AttentionAxes) -> KVCache:
    """The same over the mesh."""
    return jax.tree.map(_placer(attention), cache)


def _placed(target: str, source: str, kv_heads: int, dtype: str = "float32") -> tuple[KVCache, KVCache]:
    """A cache to write into, which may be donated, and a prefix."""
    whole = _whole(SLOTS, kv_heads, dtype), _whole(ROWS, kv_heads, dtype)
    return _place(whole[0], PLACES[target]), _place(whole[1], PLACES[source])


@functools.cache
def _program(target: str, source: str, kv_heads: int, dtype: str = "float32") -> jax.stages.Compiled:
    """(cache, prefix, row, slot) → cache; compiled once for all tests of it."""
    mesh, to, of = make_mesh(CUBE), PLACES[target], PLACES[source]
    caches = _placed(target, source, kv_heads, dtype)
    specs = cache_specs(caches[0], to), cache_specs(caches[1], of)

    def run(cache: KVCache, prefix: KVCache, row: jax.Array, slot: jax.Array) -> KVCache:
        return insert_row(cache, prefix, row, slot, to, of, kv_heads)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs[0], check_vma=True)
    program = jax.jit(sharded, in_shardings=shardings(mesh, (*specs, P(), P())), donate_argnums=0)
    return program.lower(*caches, np.int32(0), np.int32(0)).compile()


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
@pytest.mark.parametrize(("target", "source"), list(itertools.product(TARGETS, PLACES)))
def test_insert_moves_one_row_and_touches_no_other(target: str, source: str, kv_heads: int) -> None:
    _check_rows(target, source, kv_heads, "float32")


@pytest.mark.parametrize(
    ("target", "source"), [("heads", "gathered_xyz"), ("yz", "heads"), ("yzx", "yzx"), ("z", "gathered_x")]
)
def test_insert_moves_int8_values_with_their_scales(target: str, source: str) -> None:
    _check_rows(target, source, 4, "int8")


def _check_rows(target: str, source: str, kv_heads: int, dtype: str) -> None:
    found, prefix = _placed(target, source, kv_heads, dtype)
    program = _program(target, source, kv_heads, dtype)
    wanted = jax.tree.map(np.array, _whole(SLOTS, kv_heads, dtype))
    for row, slot in [(0, 0), (5, 11), (7, 2), (3, 15)]:
        found = program(found, prefix, np.int32(row), np.int32(slot))
        for whole, part in zip(
            jax.tree.leaves(wanted), jax.tree.leaves(_whole(ROWS, kv_heads, dtype)), strict=True
        ):
            whole[:, slot] = np.asarray(part)[:, row]
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(_place(wanted, PLACES[target])), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(("target", "source"), list(itertools.product(TARGETS, PLACES)))
def test_insert_moves_no_more_than_the_prefix_and_copies_no_cache(target: str, source: str) -> None:
    kv_heads = 4
    compiled, cache = _program(target, source, kv_heads), _placed(target, source, kv_heads)[0]
    moved = sum(counted_everywhere(compiled.as_text()).values())
    assert moved <= 2 * LAYERS * ROWS * kv_heads * TIME * QKV
    memory = compiled.memory_analysis()
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == held
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
