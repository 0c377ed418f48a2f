"""Laws of shared prefixes: what is held once gives the logits and texts of a copy in every row."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import LoadOptions, MeshPlacement, load_params
from checkpoints.synthetic import synthetic_state
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.generate import Generator
from inference_engine.model import OneDeviceModel
from inference_engine.request import Completion, Request
from inference_engine.sharing import plan_sharing
from inference_engine.tokenizer import ByteTokenizer
from layers import serial
from layers.attention import AttentionBlocks, attend, attend_reference
from layers.embedding import unembed
from layers.hparams import HParams, Rope
from layers.kv_cache import CacheShape, KVCache, Segment
from layers.kv_quantization import quantize_kv
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.shared_prefix import SharedPrefixes
from layers.transformer import MeshModel
from tests.engines import CONFIG, SMALL, complete, request

FORM = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=2, qkv=8, vocab=71)
WINDOWS = dataclasses.replace(FORM, windows=(4, None))
XPOS = dataclasses.replace(FORM, rope=Rope(xpos_scale_base=4.0))
BLOCKS = AttentionBlocks(queries=4, keys=3)
ROWS, ENTRIES = 3, 2


def _error(found: jax.Array | np.ndarray, wanted: jax.Array | np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(found) - wanted)) / np.max(np.abs(np.asarray(wanted))))


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("time", [1, 6])
def test_one_row_for_all_is_a_copy_in_every_row(
    time: int, window: int | None, *, int8: bool, rng: np.random.Generator
) -> None:
    k, v = (jnp.asarray(rng.normal(size=(ENTRIES, 2, 7, 8)), jnp.float32) for _ in range(2))
    held = (quantize_kv(k), quantize_kv(v)) if int8 else (k, v)
    start, length = jnp.full(ROWS, 2, jnp.int32), jnp.asarray([7, 0, 5], jnp.int32)
    copies = (jax.tree.map(lambda leaf: jnp.repeat(leaf[1:], ROWS, axis=0), leaf) for leaf in held)
    one, each = Segment(*held, start, length, row=1), Segment(*copies, start, length)
    own = Segment(*(jnp.asarray(rng.normal(size=(ROWS, 2, 4, 8)), jnp.float32) for _ in range(2)),
                  jnp.asarray([9, 2, 7], jnp.int32), jnp.full(ROWS, 4, jnp.int32))  # fmt: skip
    q = jnp.asarray(rng.normal(size=(ROWS, time, 4, 8)), jnp.float32)
    at = jnp.asarray(np.array([[12], [5], [10]]) - time + 1 + np.arange(time), jnp.int32)
    wanted = attend_reference(q, [each, own], at, window=window)
    for function in (attend, attend_reference):
        assert _error(function(q, [one, own], at, window=window, blocks=BLOCKS), wanted) < 1e-6


def test_nothing_that_no_row_sees_reaches_an_output(rng: np.random.Generator) -> None:
    k, v = (jnp.asarray(rng.normal(size=(1, 1, 6, 8)), jnp.float32) for _ in range(2))
    beyond = jnp.arange(6)[None, None, :, None] >= 4
    start, length = jnp.zeros(ROWS, jnp.int32), jnp.asarray([4, 0, 2], jnp.int32)
    q, at = jnp.ones((ROWS, 1, 2, 8), jnp.float32), jnp.full((ROWS, 1), 9, jnp.int32)
    clean = attend(q, [Segment(k, v, start, length, row=0)], at)
    poisoned = Segment(jnp.where(beyond, jnp.nan, k), jnp.where(beyond, jnp.inf, v), start, length, row=0)
    assert bool(jnp.all(attend(q, [poisoned], at) == clean))
    assert bool(jnp.all(clean[1] == 0))


def _whole(hparams: HParams, ids: np.ndarray) -> np.ndarray:
    params, start = load_params(synthetic_state(hparams), LoadOptions()), jnp.zeros((), jnp.int32)
    x, _ = serial.forward(hparams, params, jnp.asarray(ids), start)
    return np.asarray(unembed(hparams, params, x))


def _shared(hparams: HParams, ids: np.ndarray, dtype: str, *, stacked: bool = True) -> np.ndarray:
    """Logits of a row's own tokens: rows 0 and 1 share 5 tokens, row 0 four more that begin there."""
    params = load_params(synthetic_state(hparams), LoadOptions(stacked=stacked))
    shape = CacheShape(hparams.layers, ROWS, hparams.kv_heads, 16, hparams.qkv)

    def empty(rows: int) -> KVCache:
        return KVCache.zeros(shape._replace(batch=rows), jnp.dtype(dtype), stacked=stacked)

    @jax.jit
    def run(ids: jax.Array) -> jax.Array:
        zero, axis = jnp.zeros((), jnp.int32), 1 if stacked else 0
        _, outer = serial.forward(hparams, params, ids[:1, :5], zero, empty(1))
        # Three entries in two caches; nothing uses the second, and the third begins where the first ends.
        starts = jnp.asarray([0, 0, 5], jnp.int32)
        pool = SharedPrefixes((outer, empty(2)), starts, jnp.asarray([(5, 0, 0)], jnp.int32))
        _, inner = serial.forward(hparams, params, ids[:1, 5:9], zero, empty(1), shared=pool)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=1, axis=axis)
        caches = (outer, jax.tree.map(put, empty(2), inner))
        pool = SharedPrefixes(caches, starts, jnp.asarray([(5, 0, 4), (5, 0, 0), (0, 0, 0)], jnp.int32))
        own = jnp.stack([jnp.roll(row, -seen) for row, seen in zip(ids, (9, 5, 0), strict=True)])
        x, cache = serial.forward(hparams, params, own[:, :3], zero, empty(ROWS), shared=pool)
        rows = jnp.full(ROWS, 3, jnp.int32)
        y, _ = serial.forward(hparams, params, own[:, 3:4], rows, cache, shared=pool)
        return unembed(hparams, params, jnp.concatenate([x, y], axis=1))

    return np.asarray(run(ids))


@pytest.mark.parametrize("hparams", [FORM, WINDOWS, XPOS], ids=["plain", "windows", "xpos"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("int8", 2e-2)])
def test_nested_prefixes_give_the_logits_of_whole_rows(hparams: HParams, dtype: str, bound: float) -> None:
    ids = np.random.default_rng(1).integers(0, hparams.vocab, (ROWS, 13)).astype(np.int32)
    ids[1, :5] = ids[0, :5]
    wanted = _whole(hparams, ids)
    found = _shared(hparams, ids, dtype)
    for row, first in enumerate((9, 5, 0)):
        assert _error(found[row], wanted[row, first : first + 4]) < bound, row


def test_unrolled_layers_share_too() -> None:
    ids = np.random.default_rng(1).integers(0, FORM.vocab, (ROWS, 13)).astype(np.int32)
    assert _error(_shared(FORM, ids, "float32", stacked=False), _shared(FORM, ids, "float32")) < 1e-5


def test_a_prefix_is_not_repeated_for_the_rows() -> None:
    keys, rows = 1536, 8
    params = load_params(synthetic_state(FORM), LoadOptions())
    shape = CacheShape(FORM.layers, rows, FORM.kv_heads, 64, FORM.qkv)
    cache, pool = (
        jax.eval_shape(lambda s=s: KVCache.zeros(s, jnp.dtype("float32"), stacked=True))
        for s in (shape, shape._replace(batch=1, time=keys))
    )
    whole = jax.ShapeDtypeStruct((rows,), jnp.int32)
    shared = SharedPrefixes(
        (pool,), jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    )

    def step(cache: KVCache, shared: SharedPrefixes, tokens: jax.Array, at: jax.Array) -> tuple:
        return serial.forward(FORM, params, tokens[:, None], at, cache, shared=shared)

    options = {"xla_backend_optimization_level": 3}
    lowered = jax.jit(step, donate_argnums=0).lower(cache, shared, whole, whole)
    program = lowered.compile(options)
    sizes = [
        np.prod([int(n) for n in dims.split(",")])
        for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())
    ]
    block = AttentionBlocks().keys * FORM.kv_heads * FORM.qkv
    allowed = {np.prod(leaf.shape) for leaf in jax.tree.leaves((cache, pool, params))}
    assert max(set(sizes) - allowed) < rows * block
    assert program.memory_analysis().temp_size_in_bytes < rows * block * 4


SAMPLED = {"temperature": 1.0, "seed": 7}
SYSTEM = request(9, 19).token_ids


def _request(which: int, length: int, **settings: object) -> Request:
    """A prompt that begins as the others do."""
    one = request(which, length, **(SAMPLED | settings))
    return dataclasses.replace(one, token_ids=SYSTEM + one.token_ids)


REQUESTS = [
    _request(1, 12, num_samples=3, max_new_tokens=5),
    _request(2, 1),
    _request(3, 10, num_samples=2, max_new_tokens=9),
    _request(4, 14, num_samples=2, max_new_tokens=6),
    _request(5, 9, num_samples=2, max_new_tokens=8),
    _request(6, 11, num_samples=2, max_new_tokens=7),
]
TOKENS = tuple[tuple[int, ...], ...]


def _tokens(runs_on: Engine) -> TOKENS:
    done = complete(REQUESTS, runs_on)
    return tuple(done[key].token_ids for key in sorted(done))


@functools.cache
def unshared() -> TOKENS:
    return _tokens(one_device(CONFIG))


@functools.cache
def one_device(config: EngineConfig) -> Engine:
    return Engine(OneDeviceModel(SMALL), load_params(synthetic_state(SMALL), LoadOptions()), config)


def sized(**changes: object) -> EngineConfig:
    return plan_sharing(REQUESTS).sized(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize("changes", [{}, {"prefill_rows": 2}, {"slots": 1}], ids=["", "rows", "one_slot"])
def test_texts_are_those_of_an_engine_that_shares_nothing(changes: dict) -> None:
    assert _tokens(one_device(sized(**changes))) == unshared()


def test_slots_hold_only_what_is_their_own() -> None:
    shares = one_device(sized())
    assert shares.config.shared_sizes == ((1, 24), (CONFIG.slots, 16))
    assert shares.config.cache_time == 16
    held = shares.init_decode_state().cache.nbytes + sum(c.nbytes for c in shares.empty_pool().caches)
    assert shares.cache_bytes == held < one_device(CONFIG).cache_bytes


def test_what_is_shared_is_computed_once() -> None:
    generator = Generator(one_device(sized()), ByteTokenizer())
    done = [event for event in generator.run(REQUESTS) if isinstance(event, Completion)]
    assert len(done) == 12
    assert generator.stats.prefill_tokens == len(SYSTEM) + sum(
        len(r.token_ids) - 1 - len(SYSTEM) for r in REQUESTS
    )


def test_the_pool_is_read_in_place_and_written_in_place() -> None:
    runs_on = one_device(sized())
    pool = runs_on.hold(runs_on.empty_pool(), 0, SYSTEM)
    old, pool = pool, runs_on.hold(pool, 1, (1, 2, 3), (len(SYSTEM),))
    assert old.caches[0].k.is_deleted() and old.caches[1].k.is_deleted()
    runs_on.generate(runs_on.init_decode_state(), pool)
    assert not pool.caches[0].k.is_deleted()
    assert np.asarray(pool.starts).tolist() == [0, len(SYSTEM), 0, 0]


def test_an_engine_without_a_pool_says_so() -> None:
    with pytest.raises(ValueError, match="shares no prefixes"):
        one_device(CONFIG).empty_pool()


DEALT = ShardingConfig(attn_all_to_all=AttnAllToAll.AXIS_Z, context=ContextSplit.XY)
SHARDINGS = {
    "2d_yzx": (ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZX), None),
    "1d_none": (ShardingConfig(Layout.WEIGHT_STATIONARY_1D), None),
    "2d_yz_after_gathered": (
        ShardingConfig(attn_all_to_all=AttnAllToAll.AXES_YZ), ShardingConfig(Layout.WEIGHT_GATHERED_XY)
    ),
    "batch_z_after_time": (
        ShardingConfig(Layout.WEIGHT_STATIONARY_2D_BATCH_Z), ShardingConfig(Layout.WEIGHT_GATHERED_XYZ_TIME)
    ),
    "dealt": (DEALT, DEALT.for_prefill(Layout.WEIGHT_STATIONARY_2D, ContextSplit.XY)),
    "dealt_anew": (DEALT, DEALT.for_prefill(Layout.WEIGHT_GATHERED_X, ContextSplit.YZ)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDINGS)
def test_texts_on_a_mesh_are_those_of_an_engine_that_shares_nothing(name: str) -> None:
    decode, prefill = SHARDINGS[name]
    shape = MeshShape(2, 2, 2)
    mesh = make_mesh(shape)
    placement = MeshPlacement(decode.layout.form.storage, shape, mesh)
    params = load_params(synthetic_state(SMALL), LoadOptions(placement=placement))
    model = MeshModel(SMALL, shape, mesh, decode)
    first = None if prefill is None else MeshModel(SMALL, shape, mesh, prefill)
    assert _tokens(Engine(model, params, sized(), first)) == unshared()
