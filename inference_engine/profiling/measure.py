"""A cell, ready to be timed: the engine that would serve it, its weights and a full state.

The programs are those of `Engine`, which serves: nothing is written for the measurement. A decode round feeds
every slot's token as `Generator` does, with as many steps in flight; before each round the slots go back to
`context` tokens, so that all rounds do the same. A prefill round prefills whole prompts. Of the engine's
programs only the one that is timed is compiled; the cache's contents change no time, so nothing is prefilled
for a decode step.

Data flow: `Setting` → weights (kept for the next cells) → `Engine` → slots or prompts → `Subject` → seconds a
round.

Worked example: decode, batch 8, context 128, 8 steps a round: an engine of 8 slots of 136 positions; a round
is 8 calls of `generate`, and its value the time of one.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.state import CheckpointState
from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState
from inference_engine.engine import Engine
from inference_engine.generate import STEPS_IN_FLIGHT
from inference_engine.profiling.bounds import Work, decode_flops, prefill_flops
from inference_engine.profiling.settings import Method, Setting, Step
from inference_engine.steps import Models
from layers.attention import AttentionBlocks
from layers.communication import ElementBytes, layer_terms, moved_bytes
from layers.head_order import padded_form
from layers.hparams import HParams
from layers.layout import Layout, ShardingConfig, check_chunk, check_pair
from layers.mesh import make_mesh
from layers.params import Params
from layers.partitioning import check_model
from layers.serial import ForwardOptions
from layers.transformer import MeshModel

PREFILL_CHUNK = 64
COPIES_HELD = 4  # of the weights, in different dtypes and layouts


@dataclasses.dataclass
class Subject:
    """A prepared cell.

    Attributes:
      setting: what it is.
      program: the step's (`steps.Program`).
      run: one round; returns the seconds of one step. The first one is slower than the others.
      tokens: that one step makes or takes.
      work: of one chip, in one step.
      weight_bytes, cache_bytes: on one chip.
      compile_seconds, load_seconds: what preparing took; loading is 0 where the weights were there.
    """

    setting: Setting
    program: Any
    run: Callable[[], float]
    tokens: int
    work: Work
    weight_bytes: int
    cache_bytes: int
    compile_seconds: float
    load_seconds: float


class Weights:
    """A model's weights in the form that a cell needs; the latest few are kept."""

    def __init__(self, state: CheckpointState) -> None:
        self.state = state
        self._held: collections.OrderedDict[tuple[str, ...], Params] = collections.OrderedDict()

    def models(self, setting: Setting) -> Models:
        """The model on the setting's mesh; raises UserError where they do not fit.

        An engine has both steps. A decode cell prefills in its own layout, a prefill cell decodes in a
        stationary one; nothing of the other step is compiled.
        """
        shape, sharding = setting.mesh, setting.sharding
        mesh = make_mesh(shape)
        check_model(self.state.hparams, shape)
        decode = sharding if setting.step is Step.DECODE else _stationary(sharding)
        check_pair(sharding, decode, shape)
        blocks = AttentionBlocks.on(jax.default_backend())
        options = ForwardOptions(setting.activation_dtype, blocks)
        form = self.state.hparams
        return Models(*(MeshModel(form, shape, mesh, each, options) for each in (sharding, decode)))

    def load(self, model: Any, dtype: str) -> Params:
        """The weights; raises UserError where the checkpoint has no such dtype to give."""
        storage = model.sharding.layout.form.storage
        key = (str(model.shape), storage.value, dtype)
        if key not in self._held:
            while len(self._held) >= COPIES_HELD:
                self._held.popitem(last=False)
            placement = MeshPlacement(storage, model.shape, model.mesh)
            self._held[key] = load_params(self.state, LoadOptions(WeightsDtype(dtype), placement=placement))
        self._held.move_to_end(key)
        return self._held[key]


def _stationary(sharding: ShardingConfig) -> ShardingConfig:
    """A layout for the decode step over the same weights, none of which move."""
    storage = sharding.layout.form.storage
    plain = (layout for layout in Layout if layout.form.storage is storage and not layout.form.gathered)
    return dataclasses.replace(sharding, layout=next(layout for layout in plain if not layout.form.time))


def prepare(weights: Weights, setting: Setting, method: Method) -> Subject:
    """Loads, compiles and fills; nothing compiles afterwards.

    Raises UserError where something refuses the setting, and whatever else goes wrong as it is.
    """
    models, config = weights.models(setting), engine_config(setting, method)
    config.check_model(models.decode.hparams)
    if setting.step is Step.PREFILL:
        check_chunk(setting.sharding, config.prefill_chunk, setting.mesh)
    began = time.perf_counter()
    params = weights.load(models.decode, setting.weights)
    jax.block_until_ready(params)
    loaded = time.perf_counter()
    engine = Engine(models.decode, params, config, models.prefill, compiled=False)
    steps = engine.steps
    programs = {
        Step.DECODE: (steps.empty_state, steps.generate),
        Step.PREFILL: (steps.empty_prefix, steps.prefill),
    }
    for program in programs[setting.step]:
        _ = program.executable
    compiled = time.perf_counter()
    make = {Step.DECODE: _decode_subject, Step.PREFILL: _prefill_subject}[setting.step]
    return make(setting, method, engine, compile_seconds=compiled - loaded, load_seconds=loaded - began)


def engine_config(setting: Setting, method: Method) -> EngineConfig:
    """The sizes of the engine that a cell needs."""
    decode = setting.step is Step.DECODE
    return EngineConfig(
        slots=setting.batch if decode else 1,
        max_context=setting.context + method.steps if decode else setting.context + 1,
        prefill_chunk=min(PREFILL_CHUNK, setting.context),
        prefill_rows=1 if decode else setting.batch,
        activation_dtype=setting.activation_dtype,
    )


def _tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """Tokens of chance: their values, and those in the cache, change no time."""
    return np.random.default_rng(seed).integers(0, vocab, count, np.int32)


def _decode_subject(setting: Setting, method: Method, engine: Engine, **seconds: float) -> Subject:
    state = engine.init_decode_state()
    held = [state]
    slots = dataclasses.replace(state, cache=None)
    places = jax.tree.map(lambda leaf: leaf.sharding, slots)
    start = dataclasses.replace(
        jax.device_get(slots),
        tokens=_tokens(setting.batch, engine.hparams.vocab, 0),
        lengths=np.full(setting.batch, setting.context, np.int32),
        active=np.ones(setting.batch, np.bool_),
    )

    def run() -> float:
        state = dataclasses.replace(jax.device_put(start, places), cache=held.pop().cache)
        jax.block_until_ready(state)
        began = time.perf_counter()
        state = _decode(engine, state, method.steps)
        seconds = time.perf_counter() - began
        held.append(state)
        return seconds / method.steps

    cache_bytes = chip_bytes(held[0].cache)
    seen = setting.context / engine.config.cache_time
    flops = decode_flops(engine.hparams, setting.batch, setting.context) / setting.mesh.size
    read = chip_bytes(_read_by_decode(engine.params)) + seen * cache_bytes
    work = Work(flops, read, _sent_bytes(setting, engine.hparams, 1))
    program = engine.steps.generate
    return Subject(
        setting, program, run, setting.batch, work, chip_bytes(engine.params), cache_bytes, **seconds
    )


def _decode(engine: Engine, state: DecodeState, steps: int) -> DecodeState:
    """Steps as `Generator` takes them: each one's tokens reach the host while the next ones run."""
    flying = collections.deque[Any]()
    for _ in range(steps):
        state, result = engine.generate(state)
        flying.append(result.packed)
        if len(flying) >= STEPS_IN_FLIGHT:
            np.asarray(flying.popleft())
    for packed in flying:
        np.asarray(packed)
    return state


def _prefill_subject(setting: Setting, method: Method, engine: Engine, **seconds: float) -> Subject:
    del method
    # The last token of a prompt is fed by decoding: one more than what is prefilled.
    vocab, count = engine.hparams.vocab, setting.context + 1
    prompts = [_tokens(count, vocab, row).tolist() for row in range(setting.batch)]

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(engine.prefill(prompts))
        return time.perf_counter() - began

    cache_bytes = chip_bytes(engine.steps.empty_prefix())
    chunks = -(-setting.context // engine.config.prefill_chunk)
    flops = prefill_flops(engine.hparams, setting.batch, setting.context) / setting.mesh.size
    sent = chunks * _sent_bytes(setting, engine.hparams, engine.config.prefill_chunk)
    work = Work(flops, float(chunks * chip_bytes(engine.params.layers)), sent)
    tokens = setting.batch * setting.context
    program = engine.steps.prefill
    return Subject(setting, program, run, tokens, work, chip_bytes(engine.params), cache_bytes, **seconds)


def _sent_bytes(setting: Setting, hparams: HParams, time: int) -> float:
    """Bytes that a chip sends in all layers for `time` tokens of each text; 0 where no formula says it."""
    if not hparams.fused:
        return 0.0
    kinds = (setting.weights, setting.activation_dtype, setting.reduce_dtype)
    sizes = ElementBytes(*(jnp.dtype(kind).itemsize for kind in kinds))
    padded = padded_form(hparams, setting.mesh)
    terms = layer_terms(padded, setting.mesh, setting.sharding, setting.batch, time)
    return float(hparams.layers * moved_bytes(terms, sizes))


def _read_by_decode(params: Params) -> Params:
    """What a decode step reads whole: of an embedding that is not the output projection it reads rows."""
    return params if params.lm_head is None else dataclasses.replace(params, embedding=None)


def chip_bytes(tree: Any) -> int:
    """Bytes of a pytree's arrays on the first of their devices."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        first = min(shard.device.id for shard in leaf.addressable_shards)
        total += sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.device.id == first)
    return total
