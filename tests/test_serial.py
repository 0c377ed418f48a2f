"""The one-device model computes what the NumPy restatement says, for every form, however it is fed.

Three ways of feeding the same tokens: all at once without a cache; in chunks through a cache, with
attention in small blocks; one token a step, the rows at different positions. The caches start full of
NaN, so that a key which was never written cannot go unseen.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.int8 import dequantize, quantize_state
from checkpoints.preprocess import preprocess
from checkpoints.state import CheckpointState, QuantizedTensor
from layers.attention import AttentionBlocks
from layers.embedding import unembed
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.params import Params
from layers.serial import ForwardOptions, forward
from tests.model_forms import FORMS, random_ids, random_weights
from tests.reference_model import reference_logits

TOLERANCE = 1e-5
BATCH, TIME, CHUNK = 2, 20, 5
CACHE_TIME = 23  # more than the tokens; no multiple of a block, so that the last one overlaps its neighbour
SMALL_BLOCKS = ForwardOptions(blocks=AttentionBlocks(queries=3, keys=8))
# One of each shape of block: fused, parallel with two norms, serial, with post norms, all biases, qk-norm.
SOME_FORMS = ("palm", "neox", "qwen3", "gemma2", "phi", "parallel_pre_and_post", "large_epsilons_layer_norm")
# A program a form and a way of feeding: compiling them without optimisation is seven times as fast.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def _forward(
    hparams: HParams,
    params: Params,
    tokens: jax.Array,
    start: jax.Array,
    cache: KVCache | None,
    options: ForwardOptions = ForwardOptions(),
) -> tuple[jax.Array, KVCache | None]:
    x, cache = forward(hparams, params, tokens, start, cache, options)
    return unembed(hparams, params, x), cache


_logits = jax.jit(_forward, static_argnames=("hparams", "options"), compiler_options=QUICKLY)
_optimised_logits = jax.jit(_forward, static_argnames=("hparams", "options"))
_preprocess = jax.jit(
    functools.partial(preprocess, dtype=jnp.dtype("float32")),
    static_argnames=("hparams", "stacked"),
    compiler_options=QUICKLY,
)


@functools.cache
def _expected(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, ids and the restatement's logits of a form."""
    hparams = FORMS[name]
    weights, ids = random_weights(hparams, seed=7), random_ids(hparams, BATCH, TIME, seed=7)
    return weights, ids, reference_logits(hparams, weights, ids)


@functools.cache
def _params(name: str, *, stacked: bool) -> Params:
    return _preprocess(FORMS[name], _expected(name)[0], stacked=stacked)


def _nan_cache(hparams: HParams, *, stacked: bool) -> KVCache:
    shape = (BATCH, hparams.kv_heads, CACHE_TIME, hparams.qkv)

    def nans(*lead: int) -> jax.Array:
        return jax.device_put(np.full((*lead, *shape), np.nan, np.float32))  # without compiling a fill

    if stacked:
        return KVCache(nans(hparams.layers), nans(hparams.layers))
    return KVCache(*(tuple(nans() for _ in range(hparams.layers)) for _ in range(2)))


def _error(logits: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(logits - reference)) / np.max(np.abs(reference)))


def _position(at: int) -> jax.Array:
    return jnp.asarray(at, jnp.int32)


@pytest.mark.parametrize("name", FORMS)
def test_all_tokens_at_once_agree_with_the_restatement(name: str) -> None:
    _, ids, expected = _expected(name)
    logits, cache = _logits(FORMS[name], _params(name, stacked=True), jnp.asarray(ids), _position(0), None)
    assert cache is None
    assert logits.dtype == jnp.float32
    assert _error(np.asarray(logits), expected) < TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_chunks_through_the_cache_agree_with_the_restatement(name: str) -> None:
    hparams, (_, ids, expected) = FORMS[name], _expected(name)
    params, cache = _params(name, stacked=True), _nan_cache(hparams, stacked=True)
    chunks = []
    for start in range(0, TIME, CHUNK):
        tokens = jnp.asarray(ids[:, start : start + CHUNK])
        logits, cache = _logits(hparams, params, tokens, _position(start), cache, SMALL_BLOCKS)
        chunks.append(np.asarray(logits))
    assert _error(np.concatenate(chunks, axis=1), expected) < TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_single_tokens_of_rows_at_different_positions_agree_with_the_restatement(name: str) -> None:
    hparams, (_, ids, expected) = FORMS[name], _expected(name)
    params, cache = _params(name, stacked=False), _nan_cache(hparams, stacked=False)
    lag, rows = 3, np.arange(BATCH)
    logits = np.full_like(expected, np.nan)
    for step in range(TIME + lag):
        # Row 1 waits at its first token while row 0 goes ahead; row 0 repeats its last one in the end.
        at = np.array([min(step, TIME - 1), max(step - lag, 0)], np.int32)
        tokens = jnp.asarray(ids[rows, at][:, None])
        out, cache = _logits(hparams, params, tokens, jnp.asarray(at), cache)
        logits[rows, at] = np.asarray(out)[:, 0]
    assert _error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["palm", "gemma2"])
def test_optimised_program_agrees_with_the_restatement(name: str) -> None:
    hparams, (_, ids, expected) = FORMS[name], _expected(name)
    params, cache = _params(name, stacked=True), _nan_cache(hparams, stacked=True)
    logits, _ = _optimised_logits(hparams, params, jnp.asarray(ids), _position(0), cache, SMALL_BLOCKS)
    assert _error(np.asarray(logits), expected) < TOLERANCE


@pytest.mark.parametrize("name", SOME_FORMS)
def test_int8_weights_agree_with_the_restatement_of_their_values(name: str) -> None:
    hparams, (weights, ids, _) = FORMS[name], _expected(name)
    state = quantize_state(CheckpointState(hparams, weights))
    values = {key: np.asarray(dequantize(entry)[...]) for key, entry in state.weights.items()}
    params = preprocess(hparams, _on_device(state), jnp.dtype("float32"), stacked=False)
    logits, _ = _logits(hparams, params, jnp.asarray(ids), _position(0), None)
    assert _error(np.asarray(logits), reference_logits(hparams, values, ids)) < TOLERANCE


def _on_device(state: CheckpointState) -> Mapping[str, jax.Array | QuantizedTensor]:
    def put(entry: object) -> jax.Array | QuantizedTensor:
        if isinstance(entry, QuantizedTensor):
            return QuantizedTensor(jnp.asarray(entry.qvalue[...]), jnp.asarray(entry.scale[...]))
        return jnp.asarray(entry)

    return {key: put(entry) for key, entry in state.weights.items()}
