"""The programs that an engine runs: plain functions of pytrees, compiled once, ahead of time.

Everything after the build calls an executable, which cannot compile again: arguments of another shape or
dtype are an error. State and caches are donated, so a step writes in place.

Data flow:
  prefill   params, Prefix, tokens [rows, chunk], position → Prefix
  insert    DecodeState, Prefix, row, slot, request's row → DecodeState
  generate  params, DecodeState → DecodeState, StepResult
  release   DecodeState, slot → DecodeState

Worked example: the default checkpoint with 4 slots of 512 positions compiles the programs above in a few
seconds; decoding then calls `generate` alone, with one transfer of 4 · 3 integers a step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.decode_state import DecodeState, Prefix, StepResult
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
from layers import serial
from layers.attention import AttentionBlocks
from layers.embedding import unembed
from layers.hparams import HParams
from layers.kv_cache import KVCache, insert_row
from layers.params import Params


@dataclasses.dataclass(frozen=True)
class Steps:
    """Compiled executables; see the module's docstring for their arguments."""

    empty_prefix: Callable[..., Prefix]
    empty_state: Callable[..., DecodeState]
    prefill: Callable[..., Prefix]
    insert: Callable[..., DecodeState]
    generate: Callable[..., tuple[DecodeState, StepResult]]
    release: Callable[..., DecodeState]


def forward_options(config: EngineConfig) -> serial.ForwardOptions:
    """How the engine's steps compute."""
    return serial.ForwardOptions(config.activation_dtype, AttentionBlocks())


def prefill_step(
    hparams: HParams,
    config: EngineConfig,
    params: Params,
    prefix: Prefix,
    tokens: jax.Array,
    position: jax.Array,
) -> Prefix:
    """Writes the keys and values of tokens [rows, chunk] at `position`, the same for all rows."""
    options = forward_options(config)
    _, cache = serial.forward(hparams, params, tokens, position, prefix.cache, options)
    return Prefix(cache)


def generate_step(
    hparams: HParams, config: EngineConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepResult]:
    """Feeds every slot's token and samples the next one."""
    options = forward_options(config)
    x, cache = serial.forward(hparams, params, state.tokens[:, None], state.lengths, state.cache, options)
    logits = unembed(hparams, params, x)[:, 0]  # [slots, vocab]
    shard = vocab_shard(hparams.vocab, hparams.vocab)
    position = state.lengths + 1
    sampled = sample(logits, state.sampling, position, state.active, shard)
    lengths = jnp.where(state.active, position, state.lengths)
    # An unusable token is reported as −1 and never fed: a lookup of it would be NaN in every later step.
    tokens = jnp.where(state.active & (sampled.tokens >= 0), sampled.tokens, state.tokens)
    sampling = count_tokens(state.sampling, sampled.tokens, state.active, shard)
    packed = jnp.stack([sampled.tokens, lengths, state.active.astype(jnp.int32)], axis=1)
    values, ids = top_logprobs(logits, shard, config.top_logprobs)
    result = StepResult(packed, sampled.logprobs, values, ids)
    return DecodeState(cache, tokens, lengths, state.active, sampling), result


def insert_step(
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
        cache=insert_row(state.cache, prefix.cache, row, slot),
        tokens=state.tokens.at[slot].set(token),
        lengths=state.lengths.at[slot].set(length),
        active=state.active.at[slot].set(True),
        sampling=set_slot(state.sampling, slot, sampling),
    )


def release_step(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Marks a slot as free; its row goes on being computed and is never read."""
    return state.replace(active=state.active.at[slot].set(False))


def _empty_cache(hparams: HParams, config: EngineConfig, rows: int, *, stacked: bool) -> KVCache:
    dtype = jnp.dtype(config.activation_dtype)
    return KVCache.zeros(hparams, rows, config.cache_time, dtype, stacked=stacked)


def build_steps(hparams: HParams, config: EngineConfig, params: Params) -> Steps:
    """Compiles every program for these shapes; nothing compiles afterwards."""
    stacked = not isinstance(params.layers, tuple)

    def empty_prefix() -> Prefix:
        return Prefix(_empty_cache(hparams, config, config.prefill_rows, stacked=stacked))

    def empty_state() -> DecodeState:
        nothing = jnp.zeros((config.slots,), jnp.int32)
        cache = _empty_cache(hparams, config, config.slots, stacked=stacked)
        sampling = init_sampling_state(config.slots, hparams.vocab)
        return DecodeState(cache, nothing, nothing, nothing > 0, sampling)

    def prefill(params: Params, prefix: Prefix, tokens: jax.Array, position: jax.Array) -> Prefix:
        return prefill_step(hparams, config, params, prefix, tokens, position)

    def generate(params: Params, state: DecodeState) -> tuple[DecodeState, StepResult]:
        return generate_step(hparams, config, params, state)

    prefix, state = jax.eval_shape(empty_prefix), jax.eval_shape(empty_state)
    number = np.int32(0)
    chunk = np.zeros((config.prefill_rows, config.prefill_chunk), np.int32)
    row = sampling_row(SamplingParams(), (), hparams.vocab)
    return Steps(
        empty_prefix=_compile(empty_prefix),
        empty_state=_compile(empty_state),
        prefill=_compile(prefill, params, prefix, chunk, number, donate=(1,)),
        insert=_compile(insert_step, state, prefix, *(number,) * 4, row, donate=(0,)),
        generate=_compile(generate, params, state, donate=(1,)),
        release=_compile(release_step, state, number, donate=(0,)),
    )


def _compile(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
    return jax.jit(function, donate_argnums=donate).lower(*args).compile()
