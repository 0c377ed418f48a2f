"""The programs that an engine runs: plain functions of pytrees, compiled once, ahead of time.

Everything after that calls an executable, which cannot compile again: arguments of another shape or
dtype are an error. State and caches are donated, so a step writes in place.

Data flow:
  prefill   params, Prefix, tokens [rows, chunk], position → Prefix
  insert    DecodeState, Prefix, row, slot, request's row → DecodeState, in decoding's layout
  generate  params, DecodeState → DecodeState, StepResult
  release   DecodeState, slot → DecodeState

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
from inference_engine.decode_state import DecodeState, Prefix, StepResult
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

    def compile(self) -> None:
        """Compiles what is not compiled yet: nothing compiles afterwards."""
        for program in vars(self).values():
            _ = program.executable


def prefill_step(
    model: Model, params: Params, prefix: Prefix, tokens: jax.Array, position: jax.Array
) -> Prefix:
    """Writes the keys and values of tokens [rows, chunk] at `position`, the same for all rows."""
    _, cache = model.forward(params, tokens, position, prefix.cache)
    return Prefix(cache)


def generate_step(
    model: Model, top_count: int, params: Params, state: DecodeState
) -> tuple[DecodeState, StepResult]:
    """Feeds every slot's token and samples the next one."""
    x, cache = model.forward(params, state.tokens[:, None], state.lengths, state.cache)
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
    return DecodeState(cache, tokens, lengths, state.active, sampling), result


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
) -> DecodeState:
    """Puts row `row` of a prefix, and a request's last prompt token and settings, into a slot."""
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
    )


def release_step(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Marks a slot as free; its row goes on being computed and is never read."""
    return dataclasses.replace(state, active=state.active.at[slot].set(False))


def _empty_state(model: Model, config: EngineConfig, *, stacked: bool) -> DecodeState:
    nothing = jnp.zeros((config.slots,), jnp.int32)
    return DecodeState(
        cache=_empty_cache(model, config, config.slots, stacked=stacked),
        tokens=nothing,
        lengths=nothing,
        active=nothing > 0,
        sampling=init_sampling_state(config.slots, model.padded_vocab),
    )


def _empty_cache(model: Model, config: EngineConfig, rows: int, *, stacked: bool) -> KVCache:
    shape = model.cache_shape(rows, config.cache_time)
    return KVCache.zeros(shape, jnp.dtype(config.activation_dtype), stacked=stacked)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """How the pytrees of the steps lie on the mesh; on one device nothing reads them."""

    params: Any
    prefix: Prefix
    state: DecodeState
    row: SamplingState
    everywhere: P = P()

    @property
    def result(self) -> StepResult:
        """The same on all chips."""
        return StepResult(*(self.everywhere,) * 4)


def _specs(models: Models, params: Params, prefix: Prefix, state: DecodeState) -> _Specs:
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
    )
    prefix_specs = Prefix(models.prefill.cache_specs(prefix.cache))
    return _Specs(model.param_specs(params), prefix_specs, state_specs, sampling_specs(state.sampling, 0))


def build_steps(models: Models, config: EngineConfig, params: Params) -> Steps:
    """Every program for these shapes, not compiled yet; see `Steps.compile`."""
    model = models.decode
    stacked = not isinstance(params.layers, tuple)
    empty_state = functools.partial(_empty_state, model, config, stacked=stacked)

    def empty_prefix() -> Prefix:
        return Prefix(_empty_cache(models.prefill, config, config.prefill_rows, stacked=stacked))

    prefix, state = jax.eval_shape(empty_prefix), jax.eval_shape(empty_state)
    specs = _specs(models, params, prefix, state)
    number, one = np.int32(0), specs.everywhere
    chunk = np.zeros((config.prefill_rows, config.prefill_chunk), np.int32)
    row = sampling_row(SamplingParams(), (), model.padded_vocab)
    prefill = functools.partial(prefill_step, models.prefill)
    generate = functools.partial(generate_step, model, config.top_logprobs)
    insert = functools.partial(insert_step, model, models.prefill)
    program = functools.partial(_program, model)
    return Steps(
        empty_prefix=_constant(model, empty_prefix, specs.prefix),
        empty_state=_constant(model, empty_state, specs.state),
        prefill=program(
            prefill,
            (params, prefix, chunk, number),
            (specs.params, specs.prefix, one, one),
            specs.prefix,
            donated=1,
        ),
        insert=program(
            insert,
            (state, prefix, *(number,) * 4, row),
            (specs.state, specs.prefix, *(one,) * 4, specs.row),
            specs.state,
            donated=0,
        ),
        generate=program(
            generate, (params, state), (specs.params, specs.state), (specs.state, specs.result), donated=1
        ),
        release=program(release_step, (state, number), (specs.state, one), specs.state, donated=0),
    )


def _program(
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


def _constant(model: Model, function: Callable[[], Any], out_specs: Any) -> Program:
    """A program that makes whole arrays in their shardings."""
    return Program(jax.jit(function, out_shardings=model.placed(out_specs)).lower)
