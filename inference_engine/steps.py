"""The programs that an engine runs: plain functions of pytrees, compiled once, ahead of time.

Everything after that calls an executable, which cannot compile again: arguments of another shape or
dtype are an error. State and caches are donated, so a step writes in place.

Data flow:
  prefill   params, Prefix, tokens [rows, chunk], index in the row → Prefix
  insert    DecodeState, Prefix, row, slot, request's row → DecodeState, in decoding's layout
  generate  params, DecodeState → DecodeState, StepResult
  release   DecodeState, slot → DecodeState
  hold      SharedPool, Prefix, place in a room, entry, position → SharedPool

Where prefixes are shared, prefill and generate also take the pool, prefill and insert the keys of each of its
entries that a row sees.

The functions see one chip's arrays: `Model.sharded` puts them inside the mesh's boundary, or on one device
leaves them as they are. What is not a weight or a cache is the same on all chips, but for the rows of the
sampling state that are as long as the vocabulary.

Worked example: the default checkpoint with 4 slots of 512 positions compiles the programs above in a few
seconds; decoding then calls `generate` alone, with one transfer of 4 · 3 integers a step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState, Prefix, SharedPool, StepResult
from inference_engine.model import Model
from inference_engine.sampling import sample, top_logprobs
from inference_engine.sampling_params import SamplingParams
from inference_engine.sampling_state import (
    SamplingState,
    count_tokens,
    init_sampling_state,
    sampling_row,
    set_slot,
)
from inference_engine.shared_pool import decode_view, empty_pool, hold_step, pool_specs, prefill_view
from inference_engine.vocab_shard import vocab_shard
from layers.cache_insert import insert_row
from layers.kv_cache import KVCache
from layers.params import Params


class Models(NamedTuple):
    """One model as prefill and decoding run it: on a mesh in two layouts, maybe, of the same weights."""

    prefill: Model
    decode: Model


class Program:
    """An executable of a step; what measures single steps lets each be compiled at its first call."""

    def __init__(self, lower: Callable[[], jax.stages.Lowered]) -> None:
        self._lower = lower

    @functools.cached_property
    def executable(self) -> jax.stages.Compiled:
        """The compiled step."""
        return self._lower().compile()

    def compile(self) -> None:
        """Compiles it now, if it is not yet."""
        _ = self.executable

    def __call__(self, *args: Any) -> Any:
        """Runs it."""
        return self.executable(*args)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The programs; see the module's docstring for their arguments and results."""

    empty_prefix: Program
    empty_state: Program
    prefill: Program
    insert: Program
    generate: Program
    release: Program
    empty_pool: Program | None = None
    hold: tuple[Program, ...] = ()

    def compile(self) -> None:
        """Compiles what is not compiled yet: nothing compiles afterwards."""
        for value in vars(self).values():
            for program in value if isinstance(value, tuple) else (value,):
                if program is not None:
                    program.compile()


def prefill_step(
    model: Model,
    params: Params,
    prefix: Prefix,
    tokens: jax.Array,
    index: jax.Array,
    pool: SharedPool | None = None,
    lengths: jax.Array | None = None,
) -> Prefix:
    """Writes the keys and values of tokens [rows, chunk] at `index`, the same for all rows.

    The rows see `lengths` [rows, entries] keys of the pool before their own.
    """
    shared = None if pool is None or lengths is None else prefill_view(pool, lengths)
    _, cache = model.forward(params, tokens, index, prefix.cache, shared)
    return Prefix(cache)


def generate_step(
    model: Model, top_count: int, params: Params, state: DecodeState, pool: SharedPool | None = None
) -> tuple[DecodeState, StepResult]:
    """Feeds every slot's token and samples the next one."""
    shared = None if pool is None else decode_view(pool, state)
    index = state.lengths if shared is None else state.lengths - shared.offsets
    x, cache = model.forward(params, state.tokens[:, None], index, state.cache, shared)
    logits = model.logits(params, x, len(state.tokens))[:, 0]  # [slots, vocab shard]
    shard = vocab_shard(model.hparams.vocab, logits.shape[1], model.vocab_axes)
    position = state.lengths + 1
    sampled = sample(logits, state.sampling, position, state.active, shard)
    lengths = jnp.where(state.active, position, state.lengths)
    # An unusable token is reported as −1 and never fed: a lookup of it would be NaN in every later step.
    tokens = jnp.where(state.active & (sampled.tokens >= 0), sampled.tokens, state.tokens)
    sampling = count_tokens(state.sampling, sampled.tokens, state.active, shard)
    packed = jnp.stack([sampled.tokens, lengths, state.active.astype(jnp.int32)], axis=1)
    values, ids = top_logprobs(logits, shard, top_count)
    result = StepResult(packed, sampled.logprobs, values, ids)
    moved = {"cache": cache, "tokens": tokens, "lengths": lengths, "sampling": sampling}
    return dataclasses.replace(state, **moved), result


def insert_step(
    model: Model,
    prefill_model: Model,
    state: DecodeState,
    prefix: Prefix,
    row: jax.Array,
    slot: jax.Array,
    token: jax.Array,
    length: jax.Array,
    sampling: SamplingState,
    shared_lengths: jax.Array | None = None,
) -> DecodeState:
    """Puts row `row` of a prefix, and a request's last prompt token and settings, into a slot.

    `shared_lengths` [entries] are the keys of the pool that the slot sees before the row's.
    """
    shares = None if shared_lengths is None else state.shared_lengths.at[slot].set(shared_lengths)
    return DecodeState(
        cache=insert_row(
            state.cache,
            prefix.cache,
            row,
            slot,
            target=model.attention,
            source=prefill_model.attention,
            kv_heads=model.padded_kv_heads,
        ),
        tokens=state.tokens.at[slot].set(token),
        lengths=state.lengths.at[slot].set(length),
        active=state.active.at[slot].set(True),
        sampling=set_slot(state.sampling, slot, sampling),
        shared_lengths=shares,
    )


def release_step(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Marks a slot as free; its row goes on being computed, from position 0, and is never read."""
    shares = None if state.shared_lengths is None else state.shared_lengths.at[slot].set(0)
    freed = {"active": state.active.at[slot].set(False), "lengths": state.lengths.at[slot].set(0)}
    return dataclasses.replace(state, **freed, shared_lengths=shares)


def _empty_state(model: Model, config: EngineConfig, *, stacked: bool) -> DecodeState:
    nothing = jnp.zeros((config.slots,), jnp.int32)
    return DecodeState(
        cache=empty_cache(model, config, (config.slots, config.cache_time), stacked=stacked),
        tokens=nothing,
        lengths=nothing,
        active=nothing > 0,
        sampling=init_sampling_state(config.slots, model.padded_vocab),
        shared_lengths=jnp.tile(nothing[:, None], (1, entries))
        if (entries := config.shared_prefixes)
        else None,
    )


def empty_cache(model: Model, config: EngineConfig, size: tuple[int, int], *, stacked: bool) -> KVCache:
    """An empty cache of a number of sequences and of positions, whole arrays."""
    shape = model.cache_shape(*size)
    return KVCache.zeros(shape, jnp.dtype(config.cache_dtype), stacked=stacked)


def cache_bytes(model: Model, config: EngineConfig) -> int:
    """Bytes of the slots' own keys and values, over all chips."""
    size = (config.slots, config.cache_time)
    return jax.eval_shape(lambda: empty_cache(model, config, size, stacked=True)).nbytes


@dataclasses.dataclass(frozen=True)
class _Specs:
    """How the pytrees of the steps lie on the mesh; on one device nothing reads them."""

    params: Any
    prefix: Prefix
    state: DecodeState
    row: SamplingState
    pool: SharedPool
    everywhere: P = P()

    @property
    def result(self) -> StepResult:
        """The same on all chips."""
        return StepResult(*(self.everywhere,) * 4)


def _specs(models: Models, params: Params, prefix: Prefix, state: DecodeState, pool: SharedPool) -> _Specs:
    model = models.decode

    def sampling_specs(tree: SamplingState, slot_dims: int) -> SamplingState:
        long = P(*(None,) * slot_dims, model.vocab_axes or None)
        specs = jax.tree.map(lambda _: P(), tree)
        return dataclasses.replace(specs, output_counts=long, prompt_mask=long, logit_bias=long)

    state_specs = DecodeState(
        cache=model.cache_specs(state.cache),
        tokens=P(),
        lengths=P(),
        active=P(),
        sampling=sampling_specs(state.sampling, 1),
        shared_lengths=None if state.shared_lengths is None else P(),
    )
    return _Specs(
        params=model.param_specs(params),
        prefix=Prefix(models.prefill.cache_specs(prefix.cache)),
        state=state_specs,
        row=sampling_specs(state.sampling, 0),
        pool=pool_specs(*models, pool),
    )


class _Extra(NamedTuple):
    """Further arguments of a step, with their specs."""

    args: tuple[Any, ...] = ()
    specs: tuple[Any, ...] = ()


def build_steps(models: Models, config: EngineConfig, params: Params) -> Steps:
    """Every program for these shapes, not compiled yet; see `Steps.compile`."""
    model = models.decode
    stacked = not isinstance(params.layers, tuple)
    empty_state = functools.partial(_empty_state, model, config, stacked=stacked)
    no_pool = functools.partial(empty_pool, *models, config, stacked=stacked)

    def empty_prefix() -> Prefix:
        size = (config.prefill_rows, config.prefill_time)
        return Prefix(empty_cache(models.prefill, config, size, stacked=stacked))

    prefix, state, pool = jax.eval_shape(lambda: (empty_prefix(), empty_state(), no_pool()))
    specs = _specs(models, params, prefix, state, pool)
    number, one, entries = np.int32(0), specs.everywhere, config.shared_prefixes
    chunk = np.zeros((config.prefill_rows, config.prefill_chunk), np.int32)
    row = sampling_row(SamplingParams(), (), model.padded_vocab)
    reads, rows_see, slot_sees = _Extra(), _Extra(), _Extra()
    if entries:
        reads = _Extra((pool,), (specs.pool,))
        rows_see = _Extra((np.zeros((config.prefill_rows, entries), np.int32),), (one,))
        slot_sees = _Extra((np.zeros(entries, np.int32),), (one,))
    program = functools.partial(step_program, model)
    steps = Steps(
        empty_prefix=constant_program(model, empty_prefix, specs.prefix),
        empty_state=constant_program(model, empty_state, specs.state),
        prefill=program(
            functools.partial(prefill_step, models.prefill),
            (params, prefix, chunk, number, *reads.args, *rows_see.args),
            (specs.params, specs.prefix, one, one, *reads.specs, *rows_see.specs),
            specs.prefix,
            donated=1,
        ),
        insert=program(
            functools.partial(insert_step, model, models.prefill),
            (state, prefix, *(number,) * 4, row, *slot_sees.args),
            (specs.state, specs.prefix, *(one,) * 4, specs.row, *slot_sees.specs),
            specs.state,
            donated=0,
        ),
        generate=program(
            functools.partial(generate_step, model, config.top_logprobs),
            (params, state, *reads.args),
            (specs.params, specs.state, *reads.specs),
            (specs.state, specs.result),
            donated=1,
        ),
        release=program(release_step, (state, number), (specs.state, one), specs.state, donated=0),
    )
    if not entries:
        return steps
    hold = tuple(
        program(
            functools.partial(hold_step, *models, room),
            (pool, prefix, *(number,) * 3),
            (specs.pool, specs.prefix, *(one,) * 3),
            specs.pool,
            donated=0,
        )
        for room in range(len(config.shared))
    )
    return dataclasses.replace(steps, empty_pool=constant_program(model, no_pool, specs.pool), hold=hold)


def step_program(
    model: Model,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
    *,
    donated: int,
) -> Program:
    """A step inside the mesh's boundary; `args` are arrays or shapes."""
    jitted = jax.jit(
        model.sharded(function, in_specs, out_specs),
        in_shardings=model.placed(in_specs),
        out_shardings=model.placed(out_specs),
        donate_argnums=donated,
    )
    return Program(functools.partial(jitted.lower, *args))


def constant_program(model: Model, function: Callable[[], Any], out_specs: Any) -> Program:
    """A program that makes whole arrays in their shardings."""
    return Program(jax.jit(function, out_shardings=model.placed(out_specs)).lower)
