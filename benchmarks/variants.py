"""The things that are timed: the bare step, the engine's step, the whole path to text, and prefill.

Each is a function without arguments that runs once and returns the seconds of one step, so that a benchmark
can call them in turn, round after round. All decode variants feed the same number of slots from the same
positions onwards.

Data flow: params → `Subject` (model, engine, prompt) → seconds a step.

Worked example: `bare` of 64 steps that take 1.6 s together returns 0.025.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.generate import Generator
from inference_engine.model import OneDeviceModel
from inference_engine.request import Request
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import Tokenizer
from layers.attention import AttentionBlocks
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.params import Params
from layers.serial import ForwardOptions

PROMPT_TOKENS = 65  # all but the last are prefilled: one whole chunk
PREFILL_TOKENS = 257


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model at one number of slots, ready to run; `steps` is how many a timing takes."""

    engine: Engine
    tokenizer: Tokenizer
    steps: int

    @property
    def slots(self) -> int:
        """Sequences that decode together."""
        return self.engine.config.slots

    def request(self, seed: int) -> Request:
        """A greedy request of random bytes' tokens."""
        high = min(256, self.engine.hparams.vocab)
        ids = np.random.default_rng(seed).integers(3, high, PROMPT_TOKENS)
        return Request("", tuple(ids.tolist()), SamplingParams(max_new_tokens=self.steps, temperature=0.0))


def make_subject(hparams: HParams, params: Params, tokenizer: Tokenizer, slots: int, steps: int) -> Subject:
    """Compiles the engine."""
    return Subject(Engine(_model(hparams), params, EngineConfig(slots=slots)), tokenizer, steps)


def whole_prompts(subject: Subject) -> Subject:
    """The same with the prefill variant's prompt in one chunk; programs are compiled when they are called."""
    engine = subject.engine
    config = dataclasses.replace(engine.config, prefill_chunk=PREFILL_TOKENS - 1)
    return dataclasses.replace(subject, engine=Engine(engine.model, engine.params, config, compiled=False))


def _model(hparams: HParams) -> OneDeviceModel:
    """As the command line runs it."""
    blocks = AttentionBlocks.on(jax.default_backend())
    return OneDeviceModel(hparams, ForwardOptions(blocks=blocks))


def bare(subject: Subject) -> Callable[[], float]:
    """The least that decoding takes: forward, arg-max and a donated cache, in a loop; nothing on the host."""
    engine, slots = subject.engine, subject.slots
    model, params = engine.model, engine.params

    def step(
        params: Params, cache: KVCache, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        x, cache = model.forward(params, tokens[:, None], lengths, cache)
        tokens = jnp.argmax(model.logits(params, x, slots)[:, 0], axis=-1).astype(jnp.int32)
        return cache, tokens, lengths + 1

    shape = model.cache_shape(slots, engine.config.cache_time)
    cache = KVCache.zeros(shape, jnp.dtype(jnp.float32), stacked=not isinstance(params.layers, tuple))
    start = jnp.full((slots,), PROMPT_TOKENS - 1, jnp.int32)
    first = jnp.arange(slots, dtype=jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(params, cache, first, start).compile()
    held = [cache]

    def run() -> float:
        tokens, lengths, cache = first, start, held.pop()
        began = time.perf_counter()
        for _ in range(subject.steps):
            cache, tokens, lengths = compiled(params, cache, tokens, lengths)
        tokens.block_until_ready()
        seconds = time.perf_counter() - began
        held.append(cache)
        return seconds / subject.steps

    return run


def engine_step(subject: Subject) -> Callable[[], float]:
    """The engine's compiled decode step in a loop: sampling and the slots' state, but no host work."""
    engine = subject.engine

    def run() -> float:
        state = engine.init_decode_state()
        for slot in range(subject.slots):
            request = subject.request(slot)
            state = engine.insert(engine.prefill([request.token_ids]), 0, state, slot, request)
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(subject.steps):
            state, _ = engine.generate(state)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / subject.steps

    return run


def whole_path(subject: Subject) -> Callable[[], float]:
    """`Generator.run`: the step, its transfer to the host, bookkeeping and text."""
    generator = Generator(subject.engine, subject.tokenizer)
    requests = [subject.request(slot) for slot in range(subject.slots)]

    def run() -> float:
        for _ in generator.run(requests):
            pass
        stats = generator.stats
        if stats.decode_steps < subject.steps // 2:
            raise RuntimeError(f"a text ended after {stats.decode_steps} of {subject.steps} tokens")
        return stats.step_milliseconds / 1e3

    return run


def prefill(subject: Subject) -> Callable[[], float]:
    """Seconds a token of prefilling one prompt in chunks."""
    prompt = np.random.default_rng(0).integers(3, 250, PREFILL_TOKENS).tolist()

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(subject.engine.prefill([prompt]))
        return (time.perf_counter() - began) / (PREFILL_TOKENS - 1)

    return run


def prefill_flops(hparams: HParams) -> float:
    """FLOPs a prompt token costs, attention's scores aside: all weights but the embedding, once.

    Of the last layer only k and v are needed: the rest of it has no reader, and the compiler drops it.
    """
    h = hparams
    keys_values = 2 * h.embed * h.kv_heads * h.qkv
    layer = 2 * h.embed * h.heads * h.qkv + 3 * h.embed * h.ff + keys_values
    return 2.0 * ((h.layers - 1) * layer + keys_values)
