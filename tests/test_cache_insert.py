"""Laws of inserting: one row moves from the prefix into its slot and no other changes, on whatever chips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.cache_insert import insert_row
from layers.kv_cache import CacheShape, KVCache
from layers.layout import AttnAllToAll
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.partitioning import cache_specs, shardings

SLOTS, ROWS, LAYERS, KV_HEADS = 16, 8, 2, 8


def _cache(rows: int, seed: int, *, stacked: bool) -> KVCache:
    shape = CacheShape(LAYERS, rows, KV_HEADS, 3, 2)
    empty = KVCache.zeros(shape, jnp.dtype("float32"), stacked=stacked)
    leaves, tree = jax.tree.flatten(empty)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    )


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
@pytest.mark.parametrize("setting", AttnAllToAll, ids=lambda setting: setting.value)
def test_insert_moves_one_row_and_touches_no_other(setting: AttnAllToAll, *, stacked: bool) -> None:
    mesh = make_mesh(MeshShape(2, 2, 2))
    cache, prefix = _cache(SLOTS, 0, stacked=stacked), _cache(ROWS, 1, stacked=stacked)
    specs = cache_specs(cache, setting), cache_specs(prefix, setting)

    def run(cache: KVCache, prefix: KVCache, row: jax.Array, slot: jax.Array) -> KVCache:
        return insert_row(cache, prefix, row, slot, setting.batch_axes)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs[0], check_vma=True)
    program = jax.jit(sharded)
    placed = jax.device_put((cache, prefix), shardings(mesh, specs))
    for row, slot in [(0, 0), (5, 11), (7, 2), (3, 15)]:
        found = program(*placed, np.int32(row), np.int32(slot))
        for old, new, source in zip(*map(jax.tree.leaves, (cache, found, prefix)), strict=True):
            axis = old.ndim - 4
            wanted = np.moveaxis(np.array(old), axis, 0)
            wanted[slot] = np.moveaxis(np.asarray(source), axis, 0)[row]
            np.testing.assert_array_equal(np.moveaxis(np.asarray(new), axis, 0), wanted)
