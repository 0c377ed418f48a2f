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

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.state import CheckpointState
from inference_engine.checking.cases import Case, Factors
from inference_engine.checking.tolerance import tolerance
from inference_engine.config import EngineConfig
from inference_engine.model import OneDeviceModel
from inference_engine.steps import Models
from layers.cache_insert import insert_row
from layers.kv_cache import KVCache
from layers.layout import WeightStorage
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.serial import ForwardOptions
from layers.transformer import MeshModel

DECODE_STEPS = 32
LARGEST_BATCH = max(Factors().batch)
COPIES_HELD = 4  # of the weights, in different dtypes and layouts

Program = Callable[..., jax.Array]
Numbers = tuple[str, str, str]
"""How one device holds numbers too: dtypes of weights, activations and cache."""
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

    What stands behind a row's last token is written by the prefill and must never be seen.
    """

    prompts: np.ndarray
    last: np.ndarray


def _inputs(prompt_tokens: int, longest: int, rows: int, vocab: int) -> _Batch:
    """The first `rows` rows of a batch that is the same for every case of these lengths."""
    prompts = np.random.default_rng(prompt_tokens).integers(0, vocab, (LARGEST_BATCH, longest), np.int32)
    last = np.maximum(prompt_tokens - 1 - np.arange(LARGEST_BATCH) % 3, 0).astype(np.int32)
    return _Batch(prompts[:rows], last[:rows])


def compiler_options(platform: str) -> dict[str, bool | int]:
    """What each case is compiled with: on a CPU without optimising what runs for milliseconds."""
    if platform != "cpu":
        return {}
    return {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def _program(
    models: Models, params: Params, batch: int, prompt: int, steps: int, kv_cache_dtype: str
) -> Program:
    """(params, prompts, last, forced) → logits `[steps, batch, vocab]`, whole arrays in and out.

    forced `[batch, steps]` are the tokens fed at each step; where one is negative, the greedy token is fed.
    """
    model, stacked = models.decode, not isinstance(params.layers, tuple)
    config = EngineConfig(activation_dtype=model.options.activation_dtype, kv_cache_dtype=kv_cache_dtype)

    def empty() -> tuple[KVCache, KVCache]:
        dtype = jnp.dtype(config.cache_dtype)
        shapes = [each.cache_shape(batch, prompt + steps) for each in models]
        prefix, cache = (KVCache.zeros(shape, dtype, stacked=stacked) for shape in shapes)
        return prefix, cache

    def run(
        params: Params,
        caches: tuple[KVCache, KVCache],
        prompts: jax.Array,
        last: jax.Array,
        forced: jax.Array,
    ) -> tuple[jax.Array, tuple[KVCache, KVCache]]:
        prefix, cache = caches
        _, prefix = models.prefill.forward(params, prompts, jnp.zeros((), jnp.int32), prefix)
        cache = _inserted(models, prefix, cache, batch)
        first = jnp.take_along_axis(prompts, last[:, None], axis=1)[:, 0]

        def step(carry: Carry, forced_now: jax.Array) -> tuple[Carry, jax.Array]:
            token, position, cache = carry
            x, cache = model.forward(params, token[:, None], position, cache)
            logits = model.logits(params, x, batch)[:, 0]
            if model.vocab_axes:  # on a mesh the tokens are forced
                return (forced_now, position + 1, cache), logits
            greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (jnp.where(forced_now < 0, greedy, forced_now), position + 1, cache), logits

        (_, _, cache), logits = lax.scan(step, (first, last, cache), forced.T)
        return logits, (prefix, cache)

    cache_specs = tuple(each.cache_specs(c) for each, c in zip(models, jax.eval_shape(empty), strict=True))
    in_specs = (model.param_specs(params), cache_specs, P(), P(), P())
    out_specs = (P(None, None, model.vocab_axes or None), cache_specs)
    program = jax.jit(
        model.sharded(run, in_specs, out_specs),
        in_shardings=model.placed(in_specs),
        out_shardings=model.placed(out_specs),
        donate_argnums=1,
        compiler_options=compiler_options(jax.default_backend()),
    )
    make_caches = jax.jit(empty, out_shardings=model.placed(cache_specs))

    def call(params: Params, prompts: np.ndarray, last: np.ndarray, forced: np.ndarray) -> jax.Array:
        return program(params, make_caches(), prompts, last, forced)[0]

    return call


def _inserted(models: Models, prefix: KVCache, cache: KVCache, batch: int) -> KVCache:
    """Each row of the prefix in the slot of the same number; the prefix itself where the layouts agree."""
    source, target = models.prefill.attention, models.decode.attention
    if source == target:
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
        self._params = functools.lru_cache(COPIES_HELD)(self._load)
        self._reference = functools.cache(self._run_reference)
        self._reference_program = functools.cache(self._compile_reference)

    def run(self, case: Case) -> Row:
        """One case against one device."""
        rows, prompt_tokens = case.batch, case.prompt_tokens
        numbers = (case.weights, case.activation_dtype, case.kv_cache_dtype)
        forced, reference = self._reference(numbers, prompt_tokens)
        forced, reference = forced[:rows], reference[:, :rows]
        options = ForwardOptions(case.activation_dtype)
        models = Models(
            *(
                MeshModel(self.state.hparams, self.shape, self.mesh, sharding, options)
                for sharding in (case.prefill, case.decode)
            )
        )
        params = self._params(case.weights, case.layout.form.storage)
        inputs = _inputs(prompt_tokens, self.longest, rows, self.state.hparams.vocab)
        program = _program(models, params, rows, self.longest, self.steps, case.kv_cache_dtype)
        logits = np.asarray(program(params, inputs.prompts, inputs.last, forced))
        return compare(case, logits[..., : self.state.hparams.vocab], reference)

    def _load(self, weights: str, storage: WeightStorage | None) -> Params:
        placement = None if storage is None else MeshPlacement(storage, self.shape, self.mesh)
        return load_params(self.state, LoadOptions(WeightsDtype(weights), placement=placement))

    def _run_reference(self, numbers: Numbers, prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Greedy tokens `[rows, steps]` and logits `[steps, rows, vocab]` of one device, largest batch."""
        inputs = _inputs(prompt_tokens, self.longest, LARGEST_BATCH, self.state.hparams.vocab)
        undecided = np.full((LARGEST_BATCH, self.steps), -1, np.int32)
        program, params = self._reference_program(numbers)
        logits = np.asarray(program(params, inputs.prompts, inputs.last, undecided))
        return np.argmax(logits, axis=-1).astype(np.int32).T, logits

    def _compile_reference(self, numbers: Numbers) -> tuple[Program, Params]:
        weights, activation_dtype, kv_cache_dtype = numbers
        model = OneDeviceModel(self.state.hparams, ForwardOptions(activation_dtype))
        params = self._params(weights, None)
        models = Models(model, model)
        program = _program(models, params, LARGEST_BATCH, self.longest, self.steps, kv_cache_dtype)
        return program, params


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
