"""The slow twin of the sampler, in NumPy with sorting, and the mixtures of requests that tests share.

Idea: `distribution` says what one request's next token may be and with which probability, by sorting the
whole vocabulary in float64; `shortest_prefix` is top-k and top-p over sorted integer weights. The sampler
neither sorts nor sees a whole vocabulary, so the two have little in common but their meaning.

Data flow: logits, `Case` → `distribution` → probabilities [vocab]; cases → `state_of` → `SamplingState`.

Worked example: logits [1, 3, 3, 2], top_k 2, temperature 1 → probabilities [0, 0.5, 0.5, 0].
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from inference_engine.sampling import Sampled, sample
from inference_engine.sampling_params import SamplingParams
from inference_engine.sampling_state import SamplingState, sampling_row
from inference_engine.vocab_shard import vocab_shard

VOCAB, WIDTH = 47, 48
"""A vocabulary and its padding; 48 columns make 2, 3 and 8 shards."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One request as the sampler meets it."""

    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    sample_index: int = 0
    position: int = 0


def request(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), sample_index: int = 0, position: int = 0,
    **fields: object,
) -> Case:  # fmt: skip
    return Case(SamplingParams(**fields), prompt, output, sample_index, position)


MIXTURE = (
    request(),
    request(temperature=1.0, seed=1),
    request(temperature=0.7, top_k=5, seed=2**40),
    request(temperature=1.3, top_p=0.6, seed=3, position=9),
    request(temperature=1.0, min_p=0.2, seed=4, sample_index=2),
    request(temperature=2.0, top_k=20, top_p=0.8, min_p=0.01, seed=5),
    request((1, 2), (3, 3, 5), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    request(temperature=1.0, logit_bias={7: 3.0, 0: -math.inf}, top_k=1, seed=6),
)  # fmt: skip
"""Eight requests that use every option, greedy and sampled."""


def state_of(cases: Sequence[Case], width: int = WIDTH) -> SamplingState:
    """One slot a case."""
    rows = [sampling_row(c.params, c.prompt, width, c.sample_index, c.output) for c in cases]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)


def positions_of(cases: Sequence[Case]) -> jax.Array:
    return jnp.array([c.position for c in cases], jnp.int32)


def padded(logits: np.ndarray, width: int = WIDTH) -> jax.Array:
    """Logits as the sampler gets them: what stands in the vocabulary's padding must not matter."""
    missing = width - logits.shape[1]
    return jnp.asarray(np.pad(logits, ((0, 0), (0, missing)), constant_values=1e9), jnp.float32)


def tied_logits(rng: np.random.Generator, slots: int, vocab: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    """Random logits of few distinct values, as bfloat16 models have them."""
    values = np.round(rng.normal(0, scale, (slots, vocab)) * 4) / 4
    return values.astype(np.float32)


@functools.cache
def one_device(vocab: int = VOCAB) -> Callable[..., Sampled]:
    """The sampler over an unsharded vocabulary, compiled once a shape."""

    def step(logits: jax.Array, state: SamplingState, positions: jax.Array, active: jax.Array) -> Sampled:
        return sample(logits, state, positions, active, vocab_shard(vocab, logits.shape[1]))

    return jax.jit(step)


def draw(logits: np.ndarray, cases: Sequence[Case]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities that the sampler gives these cases, on one device.

    Idle slots fill up to a few slot counts, so that few programs are compiled.
    """
    used = len(cases)
    slots = next(n for n in (8, 64) if n >= used)
    cases = [*cases, *[request()] * (slots - used)]
    rows = np.concatenate([logits, np.zeros((slots - used, logits.shape[1]))])
    active = jnp.arange(slots) < used
    result = one_device()(padded(rows), state_of(cases), positions_of(cases), active)
    return np.asarray(result.tokens)[:used], np.asarray(result.logprobs)[:used]


def draws(logits: np.ndarray, case: Case, count: int) -> np.ndarray:
    """Tokens of `count` requests that differ in their seed alone, for the same logits [vocab]."""
    row = sampling_row(case.params, case.prompt, WIDTH, case.sample_index, case.output)
    state = jax.tree.map(lambda leaf: jnp.asarray(np.tile(leaf, (count,) + (1,) * leaf.ndim)), row)
    seeds = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)], axis=1)
    positions = jnp.full(count, case.position, jnp.int32)
    rows, active = padded(np.tile(logits, (count, 1))), jnp.ones(count, jnp.bool_)
    return np.asarray(one_device()(rows, state.replace(seed=seeds), positions, active).tokens)


def adjusted(logits: np.ndarray, case: Case) -> np.ndarray:
    """Logits [vocab] after penalties and bias, token by token."""
    values = logits.astype(np.float64).copy()
    p = case.params
    for token in set(case.prompt) | set(case.output):
        factor = p.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(case.output):
        values[token] -= p.presence_penalty + p.frequency_penalty * case.output.count(token)
    for token, bias in p.logit_bias.items():
        values[token] += bias
    return values


def distribution(logits: np.ndarray, case: Case) -> np.ndarray:
    """Probability of each token for one request's logits [vocab]."""
    values, p = adjusted(logits, case), case.params
    order = np.lexsort((np.arange(len(values)), -values))
    if p.temperature == 0:
        return np.eye(len(values))[order[0]]
    weights = np.exp((values - values.max()) / p.temperature)
    order = order[: p.top_k] if p.top_k > 0 else order
    sums = np.cumsum(weights[order])
    order = order[: np.searchsorted(sums, p.top_p * sums[-1] * (1 - 1e-12)) + 1]
    order = order[weights[order] >= p.min_p]
    probabilities = np.zeros(len(values))
    probabilities[order] = weights[order] / weights[order].sum()
    return probabilities


def shortest_prefix(
    logits: np.ndarray, weight: np.ndarray, top_k: int, top_p: float, bits: int
) -> np.ndarray:
    """Mask [vocab] of what top-k and then top-p keep, by sorting, with weights in units of 2^−2·bits."""
    fixed = np.round(weight.astype(np.float32) * np.float32(2.0 ** (2 * bits))).astype(np.int64)
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        sums = np.cumsum(fixed[order])
        high, low = (sums >> bits).astype(np.float32), (sums & (2**bits - 1)).astype(np.float32)
        rounded = high * np.float32(2.0**bits) + low
        order = order[: np.argmax(rounded >= np.float32(top_p) * rounded[-1]) + 1]
    kept = np.zeros(len(logits), np.bool_)
    kept[order] = True
    return kept
