"""Runs one case on the mesh and on one device, and compares logits and tokens.

One device means `layers.serial`: no mesh, no collectives. It decodes greedily; the mesh is fed the same
tokens, so that one different token does not hide what follows. Rows of a batch have prompts of different
lengths, so that every row has positions and a cache of its own.

Data flow: Case → reference logits and tokens (one device, kept for cases that share them) → the same tokens
through `MeshModel` (prefill of the whole prompts, insert where decoding has another layout, then one decode
step a token) → `Row`.

Worked example: batch 3, prompt_tokens 5: rows of 5, 4 and 3 tokens, in prompts of 12. The prefill writes
positions 0 to 11 of all rows; the first decode step feeds the tokens at positions 4, 3 and 2 again, and from
there on every step overwrites what the prefill left.
"""

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.state import CheckpointState
from inference_engine.checking.cases import SHARED, Case, Factors
from inference_engine.checking.compiling import CompilerOptions, compiler_options
from inference_engine.checking.tolerance import tolerance
from inference_engine.config import EngineConfig, SharedRoom
from inference_engine.decode_state import Prefix, SharedPool
from inference_engine.model import OneDeviceModel
from inference_engine.shared_pool import empty_pool, hold_step, pool_specs, prefill_view
from inference_engine.steps import Models
from layers.cache_insert import insert_row
from layers.kv_cache import KVCache
from layers.layout import WeightStorage
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.serial import ForwardOptions
from layers.shared_prefix import SharedPrefixes
from layers.transformer import MeshModel

DECODE_STEPS = 32
LARGEST_BATCH = max(Factors().batch)
COPIES_HELD = 4  # of the weights, in different dtypes and layouts
AHEAD = 2  # cases that are compiled while one runs

Program = Callable[..., jax.Array]
Numbers = tuple[str, str, str]
"""How one device holds numbers too: dtypes of weights, activations and cache."""
Caches = tuple[KVCache, KVCache, SharedPool | None]
"""Of prefill, of decoding, and of what is shared."""
Carry = tuple[jax.Array, jax.Array, KVCache]


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of a case.

    Attributes:
      max_rel_err: max|a − b| / max|reference| over all logits.
      tokens_equal: whether the arg-max is the reference's wherever that is no tie.
      ties: positions where the reference's two best logits are within twice the tolerance.
      ok: error within the tolerance, and tokens equal.
    """

    case: Case
    max_rel_err: float
    tokens_equal: bool
    ties: int
    ok: bool

    def to_json(self) -> dict[str, Any]:
        """The case's fields and the figures."""
        finite = math.isfinite(self.max_rel_err)  # JSON has no NaN
        figures = dataclasses.asdict(self) | {"max_rel_err": self.max_rel_err if finite else None}
        figures.pop("case")
        return self.case.to_json() | figures


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Inputs of a case: prompts `[batch, longest]` and the position of each row's last prompt token.

    What stands behind a row's last token is written by the prefill and must never be seen. All rows begin
    with the same `alike` tokens.
    """

    prompts: np.ndarray
    last: np.ndarray
    alike: int


def _inputs(prompt_tokens: int, longest: int, rows: int, vocab: int) -> _Batch:
    """The first `rows` rows of a batch that is the same for every case of these lengths."""
    prompts = np.random.default_rng(prompt_tokens).integers(0, vocab, (LARGEST_BATCH, longest), np.int32)
    last = np.maximum(prompt_tokens - 1 - np.arange(LARGEST_BATCH) % 3, 0).astype(np.int32)
    alike = int(last.min()) // 2
    prompts[:, :alike] = prompts[:1, :alike]
    return _Batch(prompts[:rows], last[:rows], alike)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What a program is compiled for; a batch whose prefixes are shared holds them once."""

    batch: int
    prompt: int
    steps: int
    kv_cache_dtype: str
    shares: bool = False

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of prompts, last positions, what is alike, and forced tokens."""
        shapes = ((self.batch, self.prompt), (self.batch,), (), (self.batch, self.steps))
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)

    def config(self, activation_dtype: str) -> EngineConfig:
        """The caches' settings."""
        rooms = (SharedRoom(1, self.prompt),) if self.shares else ()
        return EngineConfig(
            prefill_chunk=1,
            activation_dtype=activation_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            shared=rooms,
        )


def _program(models: Models, params: Params, sizes: _Sizes, options: CompilerOptions) -> Program:
    """(params, batch, forced) → logits `[steps, batch, vocab]`, whole arrays in and out; it is compiled here.

    forced `[batch, steps]` are the tokens fed at each step; where one is negative, the greedy token is fed.
    """
    model, stacked = models.decode, not isinstance(params.layers, tuple)
    config = sizes.config(model.options.activation_dtype)

    def empty() -> Caches:
        shapes = [each.cache_shape(sizes.batch, sizes.prompt + sizes.steps) for each in models]
        dtype = jnp.dtype(config.cache_dtype)
        prefix, cache = (KVCache.zeros(shape, dtype, stacked=stacked) for shape in shapes)
        return prefix, cache, empty_pool(*models, config, stacked=stacked) if sizes.shares else None

    def run(
        params: Params,
        caches: Caches,
        prompts: jax.Array,
        last: jax.Array,
        alike: jax.Array,
        forced: jax.Array,
    ) -> tuple[jax.Array, Caches]:
        prefix, cache, pool = _prefilled(models, params, caches, prompts, alike)
        shared = None
        if pool is not None:
            shared = SharedPrefixes(pool.caches, pool.starts, _seen(alike, sizes.batch))
        first = jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0]

        def step(carry: Carry, forced_now: jax.Array) -> tuple[Carry, jax.Array]:
            token, index, cache = carry
            x, cache = model.forward(params, token[:, None], index, cache, shared)
            logits = model.logits(params, x, sizes.batch)[:, 0]
            if model.vocab_axes:  # on a mesh the tokens are forced
                return (forced_now, index + 1, cache), logits
            greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (jnp.where(forced_now < 0, greedy, forced_now), index + 1, cache), logits

        own = last if shared is None else last - shared.offsets
        (_, _, cache), logits = lax.scan(step, (first, own, cache), forced.T)
        return logits, (prefix, cache, pool)

    prefix, cache, pool = jax.eval_shape(empty)
    places = None if pool is None else pool_specs(*models, pool)
    cache_specs = (models.prefill.cache_specs(prefix), model.cache_specs(cache), places)
    in_specs = (model.param_specs(params), cache_specs, P(), P(), P(), P())
    out_specs = (P(None, None, model.vocab_axes or None), cache_specs)
    program = jax.jit(
        model.sharded(run, in_specs, out_specs),
        in_shardings=model.placed(in_specs),
        out_shardings=model.placed(out_specs),
        donate_argnums=1,
        compiler_options=options,
    )
    numbers = sizes.arguments()
    compiled = program.lower(params, (prefix, cache, pool), *numbers).compile()
    places_of_caches = model.placed(cache_specs)

    def call(params: Params, batch: _Batch, forced: np.ndarray) -> jax.Array:
        caches = jax.device_put(empty(), places_of_caches)
        return compiled(params, caches, batch.prompts, batch.last, np.int32(batch.alike), forced)[0]

    return call


def _seen(alike: jax.Array, rows: int) -> jax.Array:
    """Lengths `[rows, 1]` of the one prefix that all rows share; every other row sees one key less of it."""
    return jnp.maximum(alike - jnp.arange(rows, dtype=jnp.int32)[:, None] % 2, 0)


def _prefilled(
    models: Models, params: Params, caches: Caches, prompts: jax.Array, alike: jax.Array
) -> Caches:
    """Whole prompts in each row, or the first one's beginning in the pool and the rest of each in its row."""
    prefix, cache, pool = caches
    zero, rows = jnp.zeros((), jnp.int32), len(prompts)
    _, prefix = models.prefill.forward(params, prompts, zero, prefix)
    if pool is not None:
        pool = hold_step(*models, 0, pool, Prefix(prefix), zero, zero, zero)
        seen, count = _seen(alike, rows), prompts.shape[1]
        places = (seen + jnp.arange(count, dtype=jnp.int32)[None, :]) % count
        rest = jnp.take_along_axis(prompts, places, axis=1)
        _, prefix = models.prefill.forward(params, rest, zero, prefix, prefill_view(pool, seen))
    return prefix, _inserted(models, prefix, cache, rows), pool


def _inserted(models: Models, prefix: KVCache, cache: KVCache, batch: int) -> KVCache:
    """Each row of the prefix in the slot of the same number; the prefix itself where the layouts agree."""
    source, target = models.prefill.attention, models.decode.attention
    if source is None or target is None or source.cache == target.cache:
        return prefix

    def insert(row: jax.Array, cache: KVCache) -> KVCache:
        return insert_row(cache, prefix, row, row, target, source, models.decode.padded_kv_heads)

    return lax.fori_loop(0, batch, insert, cache)


def padded_prompt(tokens: int, shape: MeshShape) -> int:
    """Tokens of a prefill for prompts of so many: a count that any layout can split over time."""
    return math.ceil(tokens / shape.size) * shape.size


class Checker:
    """Runs cases of one checkpoint on one mesh; keeps weights and references that later cases share."""

    def __init__(
        self,
        state: CheckpointState,
        shape: MeshShape,
        mesh: Mesh,
        longest: int = max(Factors().prompt_tokens),
        steps: int = DECODE_STEPS,
    ) -> None:
        self.state, self.shape, self.mesh, self.steps = state, shape, mesh, steps
        self.longest = padded_prompt(longest, shape)
        loaded, lock = functools.lru_cache(COPIES_HELD)(self._load), threading.Lock()

        def one_at_a_time(weights: str, storage: WeightStorage | None) -> Params:
            with lock:
                return loaded(weights, storage)

        self._params = one_at_a_time
        self._reference = functools.cache(self._run_reference)
        self._reference_program = functools.cache(self._compile_reference)

    def run(self, case: Case) -> Row:
        """One case against one device."""
        return self._outcome(case, self._prepare(case))

    def rows(self, cases: Iterable[Case]) -> Iterator[Row]:
        """The outcomes in order; while a case runs, the next ones are compiled."""
        waiting: collections.deque[tuple[Case, Future[Program]]] = collections.deque()
        with ThreadPoolExecutor(AHEAD) as pool:
            try:
                for case in cases:
                    waiting.append((case, pool.submit(self._prepare, case)))
                    if len(waiting) > AHEAD:
                        yield self._outcome(*_finished(waiting.popleft()))
                while waiting:
                    yield self._outcome(*_finished(waiting.popleft()))
            finally:
                pool.shutdown(cancel_futures=True)

    def _prepare(self, case: Case) -> Program:
        """The case's program on the mesh."""
        options = ForwardOptions(case.activation_dtype)
        models = Models(
            *(
                MeshModel(self.state.hparams, self.shape, self.mesh, sharding, options)
                for sharding in (case.prefill, case.decode)
            )
        )
        sizes = _Sizes(case.batch, self.longest, self.steps, case.kv_cache_dtype, case.prefixes == SHARED)
        copies = self.shape.over(case.layout.form.gathered)
        return _program(models, self._weights(case), sizes, self._compiler_options(copies))

    def _outcome(self, case: Case, program: Program) -> Row:
        """Runs the case's program and compares."""
        numbers = (case.weights, case.activation_dtype, case.kv_cache_dtype)
        forced, reference = self._reference(numbers, case.prompt_tokens)
        forced, reference = forced[: case.batch], reference[:, : case.batch]
        inputs = _inputs(case.prompt_tokens, self.longest, case.batch, self.state.hparams.vocab)
        logits = np.asarray(program(self._weights(case), inputs, forced))
        return compare(case, logits[..., : self.state.hparams.vocab], reference)

    def _weights(self, case: Case) -> Params:
        return self._params(case.weights, case.layout.form.storage)

    def _compiler_options(self, copies: int) -> CompilerOptions:
        """Of a program that reads all weights once a step, or so many copies of them."""
        reads = (self.steps + 1) * copies * self.state.hparams.param_count
        return compiler_options(jax.default_backend(), reads)

    def _load(self, weights: str, storage: WeightStorage | None) -> Params:
        placement = None if storage is None else MeshPlacement(storage, self.shape, self.mesh)
        return load_params(self.state, LoadOptions(WeightsDtype(weights), placement=placement))

    def _run_reference(self, numbers: Numbers, prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Greedy tokens `[rows, steps]` and logits `[steps, rows, vocab]` of one device, largest batch."""
        inputs = _inputs(prompt_tokens, self.longest, LARGEST_BATCH, self.state.hparams.vocab)
        undecided = np.full((LARGEST_BATCH, self.steps), -1, np.int32)
        program, params = self._reference_program(numbers)
        logits = np.asarray(program(params, inputs, undecided))
        return np.argmax(logits, axis=-1).astype(np.int32).T, logits

    def _compile_reference(self, numbers: Numbers) -> tuple[Program, Params]:
        weights, activation_dtype, kv_cache_dtype = numbers
        model = OneDeviceModel(self.state.hparams, ForwardOptions(activation_dtype))
        params = self._params(weights, None)
        models = Models(model, model)
        sizes = _Sizes(LARGEST_BATCH, self.longest, self.steps, kv_cache_dtype)
        lengths = len(Factors().prompt_tokens)  # it runs once for each
        return _program(models, params, sizes, self._compiler_options(lengths)), params


def _finished(waiting: tuple[Case, Future[Program]]) -> tuple[Case, Program]:
    case, program = waiting
    return case, program.result()


def compare(case: Case, logits: np.ndarray, reference: np.ndarray) -> Row:
    """The figures of a case from logits `[steps, batch, vocab]` of the mesh and of one device."""
    allowed = tolerance(case.activation_dtype, case.reduce_dtype, case.kv_cache_dtype)
    scale = float(np.max(np.abs(reference)))
    error = float(np.max(np.abs(logits - reference))) / scale
    best = np.sort(reference, axis=-1)[..., -2:]
    tie = best[..., 1] - best[..., 0] <= 2 * allowed * scale
    differs = np.argmax(logits, axis=-1) != np.argmax(reference, axis=-1)
    equal = not bool(np.any(differs & ~tie))
    finite = bool(np.all(np.isfinite(logits)))
    return Row(case, error, equal, int(np.sum(tie)), finite and error <= allowed and equal)
