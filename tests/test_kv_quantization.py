"""Laws of the int8 cache: what rounding costs, and that nothing differs from a cache of those numbers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import LoadOptions, load_params
from checkpoints.synthetic import synthetic_state
from layers import serial
from layers.attention import AttentionBlocks, attend, attend_reference
from layers.embedding import unembed
from layers.hparams import HParams, Rope, RopePairing
from layers.kv_cache import CacheShape, KVCache, Segment
from layers.kv_quantization import QuantizedKV, quantize_kv

BATCH, HEADS, KV_HEADS, QKV, KEYS = 2, 4, 2, 8, 11
BLOCKS = AttentionBlocks(queries=4, keys=3)
FORM = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=2, qkv=16, vocab=71)
XPOS = dataclasses.replace(FORM, rope=Rope(xpos_scale_base=512.0))
INTERLEAVED = dataclasses.replace(
    FORM, rope=Rope(RopePairing.INTERLEAVED, rotary_dims=8, xpos_scale_base=512.0)
)


def dequantized(pair: QuantizedKV) -> jax.Array:
    return pair.qvalue.astype(jnp.float32) * pair.scale[..., None]


def _segments(rng: np.random.Generator) -> tuple[Segment, Segment]:
    """The same keys in int8 and as the floats that they stand for."""
    k, v = (
        quantize_kv(jnp.asarray(rng.normal(size=(BATCH, KV_HEADS, KEYS, QKV)), jnp.float32)) for _ in range(2)
    )
    start, length = jnp.asarray([0, 3], jnp.int32), jnp.asarray([11, 7], jnp.int32)
    return Segment(k, v, start, length), Segment(dequantized(k), dequantized(v), start, length)


def _queries(rng: np.random.Generator, time: int) -> tuple[jax.Array, jax.Array]:
    q = jnp.asarray(rng.normal(size=(BATCH, time, HEADS, QKV)), jnp.float32)
    return q, jnp.asarray(np.array([10, 9])[:, None] - time + 1 + np.arange(time), jnp.int32)


def _error(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))


def test_rounding_costs_half_a_step_at_most(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 3, QKV)) * 10.0 ** rng.integers(-30, 30, (5, 3, 1)), jnp.float32)
    pair = quantize_kv(x)
    assert bool(jnp.all(jnp.abs(dequantized(pair) - x) <= pair.scale[..., None] * 0.501))
    assert bool(jnp.all(jnp.max(jnp.abs(pair.qvalue), axis=-1) == 127))


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    x = jnp.asarray([[0.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 1.0]], jnp.float32)
    found = dequantized(quantize_kv(x))
    assert bool(jnp.all(found[0] == 0))
    assert not bool(jnp.any(jnp.isfinite(found[1:]).all(axis=-1)))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("time", [1, 5])
def test_attention_over_int8_is_attention_over_the_numbers_it_stands_for(
    time: int, window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    quantized, floats = _segments(rng)
    q, positions = _queries(rng, time)
    wanted = attend_reference(q, [floats], positions, window=window, cap=cap)
    for function in (attend, attend_reference):
        found = function(q, [quantized], positions, window=window, cap=cap, blocks=BLOCKS)
        assert _error(found, wanted) < 1e-6


@pytest.mark.parametrize("function", [attend, attend_reference])
def test_scales_beyond_the_length_reach_no_output(function: object, rng: np.random.Generator) -> None:
    segment, _ = _segments(rng)
    q, positions = _queries(rng, 2)
    beyond = jnp.arange(KEYS)[None, None, :] >= segment.length[:, None, None]

    def poison(pair: QuantizedKV) -> QuantizedKV:
        return QuantizedKV(pair.qvalue, jnp.where(beyond, jnp.nan, pair.scale))

    poisoned = segment.replace(k=poison(segment.k), v=poison(segment.v))
    clean = function(q, [segment], positions, blocks=BLOCKS)
    assert bool(jnp.all(function(q, [poisoned], positions, blocks=BLOCKS) == clean))


def _logits(hparams: HParams, dtype: str, start: int, *, stacked: bool = True) -> np.ndarray:
    """Of 7 tokens in two chunks and a decoded one, from `start` on; what is before has no tokens."""
    params = load_params(synthetic_state(hparams), LoadOptions(stacked=stacked))
    shape = CacheShape(hparams.layers, BATCH, hparams.kv_heads, start + 8, hparams.qkv)
    ids = np.random.default_rng(0).integers(0, hparams.vocab, (BATCH, 8)).astype(np.int32)

    @jax.jit
    def run(ids: jax.Array) -> jax.Array:
        cache, found = KVCache.zeros(shape, jnp.dtype(dtype), stacked=stacked), []
        for piece, at in ((ids[:, :4], 0), (ids[:, 4:7], 4)):
            x, cache = serial.forward(hparams, params, piece, jnp.asarray(start + at, jnp.int32), cache)
            found.append(unembed(hparams, params, x))
        rows = jnp.full(BATCH, start + 7, jnp.int32)
        x, _ = serial.forward(hparams, params, ids[:, 7:], rows, cache)
        return jnp.concatenate([*found, unembed(hparams, params, x)], axis=1)

    return np.asarray(run(ids))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unrolled"])
@pytest.mark.parametrize("hparams", [FORM, XPOS, INTERLEAVED], ids=["plain", "xpos", "interleaved"])
def test_an_int8_cache_moves_logits_by_its_rounding(hparams: HParams, *, stacked: bool) -> None:
    exact, rounded = (_logits(hparams, dtype, 0, stacked=stacked) for dtype in ("float32", "int8"))
    assert 1e-5 < _error(rounded, exact) < 2e-2


@pytest.mark.parametrize("hparams", [XPOS, INTERLEAVED], ids=["half", "interleaved"])
def test_xpos_far_from_its_centre_costs_an_int8_cache_nothing(hparams: HParams) -> None:
    exact, rounded = (_logits(hparams, dtype, 9_000) for dtype in ("float32", "int8"))
    assert _error(rounded, exact) < 2e-2


def test_a_cache_takes_a_byte_a_number_and_four_a_head() -> None:
    shape = CacheShape(3, 2, 2, 5, 16)
    for stacked in (True, False):
        cache = KVCache.zeros(shape, jnp.dtype("int8"), stacked=stacked)
        assert cache.quantized and cache.stacked is stacked and cache.time == 5
        assert cache.nbytes == 2 * 3 * 2 * 2 * 5 * (16 + 4)
    assert not KVCache.zeros(shape, jnp.dtype("float32"), stacked=True).quantized


def test_no_float_copy_of_the_cache_exists() -> None:
    shape = CacheShape(FORM.layers, BATCH, FORM.kv_heads, 2048, FORM.qkv)
    params = load_params(synthetic_state(FORM), LoadOptions())
    cache = jax.eval_shape(lambda: KVCache.zeros(shape, jnp.dtype("int8"), stacked=True))
    rows = jax.ShapeDtypeStruct((BATCH,), jnp.int32)

    def step(cache: KVCache, tokens: jax.Array, at: jax.Array) -> tuple[jax.Array, KVCache | None]:
        return serial.forward(FORM, params, tokens[:, None], at, cache)

    options = {"xla_backend_optimization_level": 3}
    program = jax.jit(step, donate_argnums=0).lower(cache, rows, rows).compile(options)
    text, memory = program.as_text(), program.memory_analysis()
    assert f"s8[{FORM.layers},{BATCH},{FORM.kv_heads},2048,{FORM.qkv}]" in text
    assert not re.findall(rf"(?:f32|bf16|f16)\[[\d,]*2048,{FORM.qkv}\]", text)
    assert memory.alias_size_in_bytes == cache.nbytes
    assert (
        memory.temp_size_in_bytes < cache.nbytes / FORM.layers
    )  # a layer in float32 would be four times that
