"""One mesh setting beside one device, for the tests of the mesh: the same weights, tokens and positions.

Every row of the batch has a prompt of another length. The prefill writes whole prompts of `LONGEST` tokens,
behind a row's own end with tokens that it never has; decoding starts at each row's own position and
overwrites them. A cache row, a position or a mask that is another row's therefore shows.

Data flow: form, mesh, setting → weights placed on the mesh → prefill, then `STEPS` decode steps in one
compiled program → logits [batch, STEPS, vocab], and those of `layers.serial` over whole sequences.

Worked example: rows of 48, 47 and 46 tokens: the first decode step feeds the tokens at positions 47, 46 and
45.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.state import CheckpointState
from inference_engine.model import OneDeviceModel
from layers.cache_insert import insert_row
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.transformer import LOGITS_SPEC, MeshModel
from tests.model_forms import FORMS, random_ids, random_weights

LONGEST, STEPS = 48, 3
FLOAT32 = WeightsDtype.FLOAT32


@functools.cache
def form(name: str) -> HParams:
    """A form of `model_forms` with sizes that divide over 6 and 8 chips, and a vocabulary that does not."""
    return dataclasses.replace(FORMS[name], embed=48, ff=96, vocab=71)


@functools.cache
def state(name: str) -> CheckpointState:
    """The form's weights."""
    return CheckpointState(form(name), random_weights(form(name), seed=0))


def starts(batch: int) -> np.ndarray:
    """The position of each row's first decoded token."""
    return (LONGEST - 1 - np.arange(batch) % 3).astype(np.int32)


def _decoded(ids: np.ndarray) -> np.ndarray:
    """Positions [batch, STEPS] of the tokens that decode steps feed."""
    return starts(len(ids))[:, None] + np.arange(STEPS)


@functools.cache
def one_device_logits(name: str, batch: int, weights: WeightsDtype = FLOAT32) -> np.ndarray:
    """[batch, STEPS, vocab] of whole sequences in one go, without a cache."""
    hparams, ids = form(name), random_ids(form(name), batch, LONGEST + STEPS, seed=1)
    model = OneDeviceModel(hparams)
    params = load_params(state(name), LoadOptions(weights))

    def run(params: Params, ids: jax.Array) -> jax.Array:
        cache = KVCache.zeros(model.cache_shape(batch, ids.shape[1]), jnp.dtype("float32"), stacked=True)
        return model.logits(params, model.forward(params, ids, jnp.zeros((), jnp.int32), cache)[0], batch)

    whole = np.asarray(jax.jit(run)(params, ids))
    return np.take_along_axis(whole, _decoded(ids)[:, :, None], axis=1)


@functools.lru_cache(2)
def placed_params(
    name: str, shape: MeshShape, layout: Layout, weights: WeightsDtype = FLOAT32, *, stacked: bool = True
) -> Params:
    """The form's weights on the mesh."""
    placement = MeshPlacement(layout.form.storage, shape, make_mesh(shape))
    return load_params(state(name), LoadOptions(weights, stacked, placement))


def mesh_logits(
    name: str,
    shape: MeshShape,
    sharding: ShardingConfig,
    batch: int,
    weights: WeightsDtype = FLOAT32,
    *,
    stacked: bool = True,
    prefill: ShardingConfig | None = None,
    cache_dtype: str = "float32",
) -> np.ndarray:
    """[batch, STEPS, vocab] of a prefill and decode steps on the mesh.

    With a layout of its own for prefill, every row is inserted into the decode cache afterwards.
    """
    hparams, ids = form(name), random_ids(form(name), batch, LONGEST + STEPS, seed=1)
    model = MeshModel(hparams, shape, make_mesh(shape), sharding)
    first = model if prefill is None else dataclasses.replace(model, sharding=prefill)
    params = placed_params(name, shape, sharding.layout, weights, stacked=stacked)
    caches = [
        KVCache.zeros(each.cache_shape(batch, LONGEST + STEPS), jnp.dtype(cache_dtype), stacked=stacked)
        for each in (first, model)
    ]
    specs = [each.cache_specs(cache) for each, cache in zip((first, model), caches, strict=True)]
    behind = np.arange(LONGEST)[None, :] > starts(batch)[:, None]
    prompts = np.where(behind, (ids[:, :LONGEST] + 1) % hparams.vocab, ids[:, :LONGEST])
    fed = np.take_along_axis(ids, _decoded(ids), axis=1)

    def run(params: Params, cache: KVCache, empty: KVCache, prompts: jax.Array, fed: jax.Array) -> jax.Array:
        _, cache = first.forward(params, prompts, jnp.zeros((), jnp.int32), cache)
        if prefill is not None:
            cache = insert_all(first, model, cache, empty, batch)

        def step(carry: tuple[jax.Array, KVCache], tokens: jax.Array) -> tuple:
            position, cache = carry
            x, cache = model.forward(params, tokens[:, None], position, cache)
            return (position + 1, cache), model.logits(params, x, batch)[:, 0]

        logits = lax.scan(step, (jnp.asarray(starts(batch)), cache), fed.T)[1]
        return logits.swapaxes(0, 1)

    program = jax.jit(
        model.sharded(run, (model.param_specs(params), *specs, P(), P()), LOGITS_SPEC),
        in_shardings=model.placed((model.param_specs(params), *specs, P(), P())),
    )
    caches = jax.device_put(caches, model.placed(specs))
    return np.asarray(program(params, *caches, prompts, fed))[..., : hparams.vocab]


def insert_all(source: MeshModel, target: MeshModel, prefix: KVCache, cache: KVCache, batch: int) -> KVCache:
    """Every row of a prefix in the slot of the same number, inside `shard_map`."""

    def insert(row: jax.Array, cache: KVCache) -> KVCache:
        kv_heads = target.padded_kv_heads
        return insert_row(cache, prefix, row, row, target.attention, source.attention, kv_heads)

    return lax.fori_loop(0, batch, insert, cache)


def error(
    name: str,
    shape: MeshShape,
    sharding: ShardingConfig,
    batch: int,
    weights: WeightsDtype = FLOAT32,
    *,
    stacked: bool = True,
    prefill: ShardingConfig | None = None,
    cache_dtype: str = "float32",
) -> float:
    """max|mesh − one device| / max|one device|; one device has no cache, so an int8 one shows."""
    reference = one_device_logits(name, batch, weights)
    options = {"stacked": stacked, "prefill": prefill, "cache_dtype": cache_dtype}
    found = mesh_logits(name, shape, sharding, batch, weights, **options)
    return float(np.max(np.abs(found - reference)) / np.max(np.abs(reference)))
