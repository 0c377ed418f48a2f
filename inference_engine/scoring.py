"""Log-probabilities of a text's own tokens, over the model and the chunks that prefill uses.

Rows are windows of the text (score_windows.py). A step writes the keys and values of one chunk of every row
and gives the log-probability of the token that follows each position: a chunk's logits exist, a text's never,
and each chip reduces its own part of the vocabulary first.

Data flow: ids → windows → batches of rows → chunks at multiples of `prefill_chunk` → one number a token.

Worked example: 130 tokens in chunks of 64 take the chunks at 0, 64 and 128 and give 129 log-probabilities:
nothing stands before the first token.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from inference_engine.config import EngineConfig
from inference_engine.model import Model
from inference_engine.sampling import token_logprobs
from inference_engine.score_windows import Window, windows
from inference_engine.steps import Program, cache_bytes, constant_program, empty_cache, step_program
from inference_engine.vocab_shard import vocab_shard
from layers.kv_cache import KVCache
from layers.params import Params

PAD_TOKEN = 0
STEPS_IN_FLIGHT = 2
Update = Callable[[int, int], None]


def score_step(
    model: Model,
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "rows chunk"],
    position: Int[Array, ""],
    targets: Int[Array, "rows chunk"],
) -> tuple[KVCache, Float[Array, "rows chunk"]]:
    """The cache with the tokens at `position` written, and log p(target | all up to its token); float32."""
    x, cache = model.forward(params, tokens, position, cache)
    logits = model.logits(params, x, len(tokens))  # [rows, chunk, vocab shard]
    shard = vocab_shard(model.hparams.vocab, logits.shape[-1], model.vocab_axes)
    flat = token_logprobs(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), shard)
    return cache, flat.reshape(targets.shape)


class _Programs(NamedTuple):
    """Compiled for one number of rows."""

    empty: Program
    step: Program


class Scorer:
    """Scores texts with one model; compiled when it is made, for up to `config.slots` windows at once.

    Attributes:
      model, params, config: what the programs were compiled for.
    """

    def __init__(self, model: Model, params: Params, config: EngineConfig) -> None:
        config.check_model(model.hparams)
        self.model, self.params, self.config = model, params, config
        self._programs = _compile(model, params, config)

    def score(self, ids: Sequence[int], stride: int, update: Update | None = None) -> np.ndarray:
        """Natural log-probabilities of all tokens but the first, float32 `[len(ids) − 1]`.

        Tokens beyond the context are scored in windows that slide by `stride`; see `score_windows`. A number
        is NaN where the model's logits were not finite. `update` is told the windows done and their number.

        Raises UserError for a stride that is none.
        """
        if len(ids) < 2:
            raise ValueError(f"{len(ids)} tokens: nothing follows anything")
        cuts = windows(len(ids), self.config.max_context, stride)
        found = np.full(len(ids) - 1, np.nan, np.float32)
        whole = np.asarray(ids, np.int32)
        rows = self.config.slots
        for first in range(0, len(cuts), rows):
            batch = cuts[first : first + rows]
            logprobs = self._run(whole, batch)
            for row, cut in enumerate(batch):
                scored = logprobs[row, cut.first_scored - cut.start - 1 : cut.end - cut.start - 1]
                found[cut.first_scored - 1 : cut.end - 1] = scored
            if update is not None:
                update(first + len(batch), len(cuts))
        return found

    @property
    def cache_bytes(self) -> int:
        """Bytes of the windows' keys and values, over all chips."""
        return cache_bytes(self.model, self.config)

    def _run(self, ids: np.ndarray, batch: Sequence[Window]) -> np.ndarray:
        """log p of each window's token t + 1 at column t, `[rows, time]`; padding's numbers mean nothing."""
        chunk = self.config.prefill_chunk
        longest = max(cut.end - cut.start for cut in batch) - 1
        shape = (self.config.slots, -(-longest // chunk) * chunk)
        tokens, targets = np.full(shape, PAD_TOKEN, np.int32), np.full(shape, PAD_TOKEN, np.int32)
        for row, cut in enumerate(batch):
            count = cut.end - cut.start - 1
            tokens[row, :count] = ids[cut.start : cut.end - 1]
            targets[row, :count] = ids[cut.start + 1 : cut.end]
        cache, flying, done = self._programs.empty(), deque[jax.Array](), []
        for start in range(0, shape[1], chunk):
            fed, wanted = (np.ascontiguousarray(a[:, start : start + chunk]) for a in (tokens, targets))
            cache, logprobs = self._programs.step(self.params, cache, fed, np.int32(start), wanted)
            flying.append(logprobs)
            if len(flying) >= STEPS_IN_FLIGHT:
                done.append(np.asarray(flying.popleft()))
        return np.concatenate([*done, *map(np.asarray, flying)], axis=1)


def _compile(model: Model, params: Params, config: EngineConfig) -> _Programs:
    """Both programs, for these shapes."""
    stacked = not isinstance(params.layers, tuple)
    empty = functools.partial(empty_cache, model, config, (config.slots, config.cache_time), stacked=stacked)
    cache = jax.eval_shape(empty)
    cache_specs, one = model.cache_specs(cache), P()
    chunk = np.zeros((config.slots, config.prefill_chunk), np.int32)
    step = step_program(
        model,
        functools.partial(score_step, model),
        (params, cache, chunk, np.int32(0), chunk),
        (model.param_specs(params), cache_specs, one, one, one),
        (cache_specs, one),
        donated=1,
    )
    programs = _Programs(constant_program(model, empty, cache_specs), step)
    for program in programs:
        program.compile()
    return programs
