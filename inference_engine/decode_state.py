"""What the decode step carries: one row a slot, a pytree that is donated and comes back.

A slot's `token` is the one whose keys and values are not in the cache yet: the last of the prompt after an
insert, the newest of the output after a step. `length` is its position, which equals the number of tokens in
the cache. So prefill never samples: every token of every request comes out of the one decode program.

The fields are `Any`: the same pytrees also carry shapes, partition specs and shardings.

Data flow: `Prefix` (prefill) → insert → `DecodeState` → generate → `DecodeState`, `StepResult`.

Worked example: the prompt (5, 7, 9) is prefilled as (5, 7). After the insert the slot has token 9 and length
2. The step writes 9's keys at position 2, samples, say, 4 for position 3, and leaves token 4, length 3.
"""

from typing import Any

import flax.struct


@flax.struct.dataclass
class Prefix:
    """Keys and values of up to `prefill_rows` prompts, `[layers, rows, kv_heads, time, qkv]`."""

    cache: Any


@flax.struct.dataclass
class SharedPool:
    """Prefixes that are held for slots to share; written by `hold` alone.

    Attributes:
      caches: one for each room of the engine's config, in decoding's layout; a room's entries are its rows.
      prefill_caches: the same in prefill's layout; None where that splits heads alike.
      starts: int32 [entries], the position of each entry's first key.
    """

    caches: Any
    prefill_caches: Any
    starts: Any


@flax.struct.dataclass
class DecodeState:
    """All slots.

    Attributes:
      cache: keys and values, one row a slot.
      tokens: int32 [slots], the token to feed next.
      lengths: int32 [slots], its position.
      active: bool [slots], whether a request is in the slot.
      sampling: see `SamplingState`.
      shared_lengths: int32 [slots, entries], the keys of each held prefix that a slot sees; None without.
    """

    cache: Any
    tokens: Any
    lengths: Any
    active: Any
    sampling: Any
    shared_lengths: Any = None


@flax.struct.dataclass
class StepResult:
    """What one step tells the host.

    Attributes:
      packed: int32 [slots, 3]: token (−1 where the logits were unusable), length after the step, and 1
        where the slot is active: tokens, lengths and valid in one array and one transfer.
      logprobs: float32 [slots], of the token under the model's own distribution.
      top_logprobs, top_ids: [slots, n], the n most likely tokens, n fixed by the engine's config.
    """

    packed: Any
    logprobs: Any
    top_logprobs: Any
    top_ids: Any
