"""What the sampler knows of each slot: a pytree with one row a slot.

Everything that a request may ask for is an array, so one compiled decode program serves every mixture of
requests. A row is built on the host as numpy arrays (`sampling_row`), written into a slot (`set_slot`),
and grows by one count a token (`count_tokens`).

Data flow: `SamplingParams` and prompt → `sampling_row` → `set_slot` → `sampling.sample` → `count_tokens`.

Worked example: a vocabulary of 4, prompt [2, 2, 1], `SamplingParams(temperature=0.5, seed=2**32 + 5)`.
The row has temperature 0.5, seed words [5, 1], prompt_mask [F, T, T, F] and output_counts [0, 0, 0, 0].
After the token 3, output_counts is [0, 0, 0, 1].
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from inference_engine.sampling_params import SamplingParams
from inference_engine.vocab_shard import VocabShard, local_index


@flax.struct.dataclass
class SamplingState:
    """One row a slot; a row on its own is the same pytree without the dim slots.

    The fields are `Any` because a pytree also carries shapes, shardings and partition specs.

    Attributes:
      temperature, top_p, min_p, repetition, presence, frequency: float32 [slots].
      top_k: int32 [slots], below 1 for off.
      seed: uint32 [slots, 2], low and high word.
      sample_index: int32 [slots], which of a prompt's samples this is.
      biased: bool [slots], whether logit_bias has an entry.
      output_counts: int32 [slots, vocab], times that a token is in the output.
      prompt_mask: bool [slots, vocab], whether a token is in the prompt.
      logit_bias: float32 [slots, vocab].
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    seed: Any
    sample_index: Any
    biased: Any
    output_counts: Any
    prompt_mask: Any
    logit_bias: Any


def sampling_row(
    params: SamplingParams,
    prompt_ids: Sequence[int],
    width: int,
    sample_index: int = 0,
    output_ids: Sequence[int] = (),
) -> SamplingState:
    """One request's row as numpy arrays.

    Args:
      params: already checked by `validate_for`.
      prompt_ids: the prompt's tokens.
      width: the vocabulary, padded to what its shards hold together.
      sample_index: which of `params.num_samples` this is.
      output_ids: tokens already generated, where a request is resumed.
    """
    bias = np.zeros(width, np.float32)
    bias[list(params.logit_bias)] = list(params.logit_bias.values())
    mask = np.zeros(width, np.bool_)
    mask[list(prompt_ids)] = True
    return SamplingState(
        temperature=np.float32(params.temperature),
        top_k=np.int32(params.top_k),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition=np.float32(params.repetition_penalty),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        seed=np.array(params.seed_words, np.uint32),
        sample_index=np.int32(sample_index),
        biased=np.bool_(bool(params.logit_bias)),
        output_counts=np.bincount(np.array(output_ids, np.int64), minlength=width).astype(np.int32),
        prompt_mask=mask,
        logit_bias=bias,
    )


def init_sampling_state(slots: int, width: int) -> SamplingState:
    """The state of `slots` greedy requests without a prompt; `width` is the padded vocabulary."""
    row = sampling_row(SamplingParams(), (), width)
    return jax.tree.map(lambda leaf: jnp.tile(leaf, (slots,) + (1,) * leaf.ndim), row)


def set_slot(state: SamplingState, slot: Int[Array, ""], row: SamplingState) -> SamplingState:
    """The state with `row` in one slot; a slot that these arrays do not have changes nothing."""
    slots = state.temperature.shape[0]
    target = jnp.where((slot >= 0) & (slot < slots), slot, slots)
    return jax.tree.map(lambda leaf, new: leaf.at[target].set(new, mode="drop"), state, row)


@jax.named_scope("sampling")
def count_tokens(
    state: SamplingState, tokens: Int[Array, " slots"], active: Bool[Array, " slots"], shard: VocabShard
) -> SamplingState:
    """The state after each active slot's output grew by its token; ids outside the vocabulary are no-ops."""
    index, held = local_index(tokens, shard)
    slots, width = state.output_counts.shape
    column = jnp.where(held & active, index, width)
    counts = state.output_counts.at[jnp.arange(slots), column].add(1, mode="drop")
    return dataclasses.replace(state, output_counts=counts)
