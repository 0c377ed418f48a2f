"""Laws of loading: forms agree, progress adds up, what cannot be is refused."""

import dataclasses
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.int8 import quantize_state
from checkpoints.lazy import Box, LazyArray
from checkpoints.load import WORKERS, LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.preprocess import preprocess
from checkpoints.state import CheckpointState, state_spec
from checkpoints.synthetic import synthetic_state
from configs.models import palm_shakespeare
from inference_engine.model import OneDeviceModel
from layers.errors import UserError
from layers.hparams import Block, HParams, NormPlacement
from layers.kv_cache import KVCache
from layers.layout import Layout
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params, layer_params
from tests.engines import SMALL

STATE = synthetic_state(SMALL)


def _equal(a: Params, b: Params) -> bool:
    return all(bool(jnp.all(x == y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("weights", list(WeightsDtype))
def test_stacked_and_unrolled_hold_the_same_weights(weights: WeightsDtype) -> None:
    stacked = load_params(STATE, LoadOptions(weights, stacked=True))
    unrolled = load_params(STATE, LoadOptions(weights, stacked=False))
    for index in range(SMALL.layers):
        assert _equal(layer_params(stacked.layers, index), unrolled.layers[index])


def test_loading_is_preprocessing() -> None:
    whole = {key: jnp.asarray(np.asarray(entry[...])) for key, entry in STATE.weights.items()}
    expected = preprocess(SMALL, whole, jnp.dtype("float32"), stacked=True)
    for loaded, direct in zip(jax.tree.leaves(load_params(STATE)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(loaded), np.asarray(direct), rtol=1e-6)


def test_progress_ends_at_all_bytes() -> None:
    calls: list[tuple[int, int]] = []
    load_params(STATE, progress=lambda done, total: calls.append((done, total)))
    expected = 4 * sum(int(np.prod(shape)) for shape in state_spec(SMALL).values())
    assert calls[-1] == (expected, expected)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_at_most_one_leaf_a_worker_is_alive_as_read() -> None:
    """A leaf that was read is let go when its shards stand, before the rest of its layer is read."""
    alive, most, lock = 0, 0, threading.Lock()

    def counted(change: int) -> None:
        nonlocal alive, most
        with lock:
            alive += change
            most = max(most, alive)

    def watched(entry: LazyArray) -> LazyArray:
        def fetch(box: Box) -> np.ndarray:
            read = np.ascontiguousarray(entry.fetch(box))
            # Where it is aligned a device would take the memory itself, and no second one would be needed.
            memory = np.empty(read.nbytes + 128, np.uint8)
            start = 4 - memory.ctypes.data % 64 + 64
            unaligned = memory[start : start + read.nbytes].view(read.dtype).reshape(read.shape)
            unaligned[...] = read
            counted(1)
            weakref.finalize(memory, counted, -1)
            return unaligned

        return LazyArray(entry.shape, entry.dtype, fetch)

    # Five layers of eight leaves: held by the layer, eight would be alive.
    hparams = dataclasses.replace(SMALL, layers=5)
    whole = synthetic_state(hparams)
    weights = {key: watched(entry) for key, entry in whole.weights.items()}
    assert len(weights) / hparams.layers >= 2 * WORKERS
    mesh = MeshShape(2, 2, 2)
    placement = MeshPlacement(Layout.WEIGHT_STATIONARY_2D.form.storage, mesh, make_mesh(mesh))
    load_params(CheckpointState(hparams, weights), LoadOptions(placement=placement))
    assert 1 <= most <= WORKERS + 1  # a worker's next leaf may come before its last one's end is seen
    assert alive == 0


@pytest.mark.parametrize("weights", [WeightsDtype.FLOAT32, WeightsDtype.BFLOAT16])
def test_int8_kernels_are_not_loaded_as_float(weights: WeightsDtype) -> None:
    with pytest.raises(UserError, match="asked of a checkpoint with int8 kernels; allowed: int8"):
        load_params(quantize_state(STATE), LoadOptions(weights))


def test_quantizing_before_equals_quantizing_while_loading() -> None:
    options = LoadOptions(WeightsDtype.INT8)
    assert _equal(load_params(quantize_state(STATE), options), load_params(STATE, options))


def test_synthetic_arrays_do_not_depend_on_the_order_of_reading() -> None:
    again = synthetic_state(SMALL)
    for key in reversed(STATE.weights):
        np.testing.assert_array_equal(
            np.asarray(STATE.weights[key][...]), np.asarray(again.weights[key][...])
        )
    other = synthetic_state(SMALL, seed=1)
    assert not np.array_equal(np.asarray(other.weights["embedding"][...]), STATE.weights["embedding"][...])


MULTIQUERY = palm_shakespeare()
GROUPED = dataclasses.replace(MULTIQUERY, heads=9, kv_heads=3)
SERIAL = dataclasses.replace(GROUPED, block=Block.SERIAL, norm_placement=NormPlacement.TWO)


@pytest.mark.parametrize("hparams", [MULTIQUERY, GROUPED, SERIAL], ids=["multiquery", "grouped", "serial"])
def test_synthetic_weights_have_power(hparams: HParams) -> None:
    model, params = OneDeviceModel(hparams), load_params(synthetic_state(hparams))
    rows, steps = 8, 32
    cache = KVCache.zeros(model.cache_shape(rows, steps + 1), jnp.dtype("float32"), stacked=True)

    @jax.jit
    def step(tokens: jax.Array, position: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        x, cache = model.forward(params, tokens[:, None], position, cache)
        return jnp.argmax(model.logits(params, x, len(x))[:, 0], axis=-1).astype(jnp.int32), cache

    fed = [jnp.arange(rows, dtype=jnp.int32)]
    for at in range(steps):
        token, cache = step(fed[-1], jnp.full(rows, at, jnp.int32), cache)
        fed.append(token)
    tokens = np.stack([np.asarray(row) for row in fed], axis=1)
    assert np.mean(tokens[:, 1:] == tokens[:, :-1]) < 0.1
    for row in tokens:
        tail = row[-12:]
        assert not any(np.array_equal(tail[period:], tail[:-period]) for period in range(1, 7))
