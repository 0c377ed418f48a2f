"""Laws of attention over segments: the blocked form against all scores at once, and what is never seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.attention import AttentionBlocks, attend, attend_reference
from layers.kv_cache import Segment

BATCH, HEADS, KV_HEADS, QKV = 2, 4, 2, 8
BLOCKS = AttentionBlocks(queries=4, keys=3)


def _segment(rng: np.random.Generator, keys: int, start: list[int], length: list[int]) -> Segment:
    k, v = (jnp.asarray(rng.normal(size=(BATCH, KV_HEADS, keys, QKV)), jnp.float32) for _ in range(2))
    return Segment(k, v, jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32))


def _queries(rng: np.random.Generator, time: int, first: list[int]) -> tuple[jax.Array, jax.Array]:
    q = jnp.asarray(rng.normal(size=(BATCH, time, HEADS, QKV)), jnp.float32)
    positions = np.array(first)[:, None] + np.arange(time)[None, :]
    return q, jnp.asarray(positions, jnp.int32)


def _relative(a: jax.Array, b: jax.Array) -> float:
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("time", [1, 4, 9])
def test_blocks_change_nothing(
    time: int, window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    prefix = _segment(rng, 7, [0, 0], [7, 5])
    own = _segment(rng, 11, [7, 5], [10, 11])
    q, positions = _queries(rng, time, [17 - time, 16 - time])
    reference = attend_reference(q, [prefix, own], positions, window=window, cap=cap)
    blocked = attend(q, [prefix, own], positions, window=window, cap=cap, blocks=BLOCKS)
    assert _relative(blocked, reference) < 1e-6


def test_two_segments_are_one_long_one(rng: np.random.Generator) -> None:
    whole = _segment(rng, 12, [0, 0], [12, 12])
    first = Segment(whole.k[:, :, :5], whole.v[:, :, :5], whole.start, whole.start + 5)
    second = Segment(whole.k[:, :, 5:], whole.v[:, :, 5:], whole.start + 5, whole.start + 7)
    q, positions = _queries(rng, 6, [6, 4])
    one = attend(q, [whole], positions, blocks=BLOCKS)
    assert _relative(attend(q, [first, second], positions, blocks=BLOCKS), one) < 1e-6


@pytest.mark.parametrize("function", [attend, attend_reference])
def test_nothing_beyond_the_length_reaches_an_output(function: object, rng: np.random.Generator) -> None:
    prefix, own = _segment(rng, 8, [0, 0], [3, 5]), _segment(rng, 4, [3, 5], [4, 4])
    q, positions = _queries(rng, 2, [5, 7])
    clean = function(q, [prefix, own], positions, blocks=BLOCKS)
    beyond = jnp.arange(8)[None, None, :, None] >= prefix.length[:, None, None, None]
    poisoned = prefix.replace(k=jnp.where(beyond, jnp.nan, prefix.k), v=jnp.where(beyond, jnp.inf, prefix.v))
    assert bool(jnp.all(function(q, [poisoned, own], positions, blocks=BLOCKS) == clean))


@pytest.mark.parametrize("function", [attend, attend_reference])
def test_a_row_that_sees_no_key_gives_zero(function: object, rng: np.random.Generator) -> None:
    later = _segment(rng, 6, [10, 0], [6, 0])
    q, positions = _queries(rng, 2, [3, 3])
    assert bool(jnp.all(function(q, [later], positions, blocks=BLOCKS) == 0))


def test_query_head_uses_its_groups_kv_head(rng: np.random.Generator) -> None:
    segment = _segment(rng, 1, [0, 0], [1, 1])
    q, positions = _queries(rng, 1, [0, 0])
    out = attend(q, [segment], positions)
    for head in range(HEADS):
        expected = segment.v[:, head // (HEADS // KV_HEADS), 0]
        assert _relative(out[:, 0, head], expected) < 1e-6


def test_softmax_is_in_base_two() -> None:
    k = jnp.asarray([[[[0.0], [1.0]]]], jnp.float32)
    v = jnp.asarray([[[[3.0], [6.0]]]], jnp.float32)
    segment = Segment(k, v, jnp.zeros(1, jnp.int32), jnp.full(1, 2, jnp.int32))
    out = attend(jnp.ones((1, 1, 1, 1)), [segment], jnp.ones((1, 1), jnp.int32))
    assert float(out[0, 0, 0, 0]) == pytest.approx(3 / 3 + 2 * 6 / 3)


def test_no_time_by_time_array_exists() -> None:
    time = 4096
    q, positions = jnp.ones((1, time, 2, 8), jnp.float32), jnp.arange(time, dtype=jnp.int32)[None]

    @jax.jit
    def run(q: jax.Array, at: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, [Segment(k, v, jnp.zeros(1, jnp.int32), jnp.full(1, time, jnp.int32))], at)

    keys = jnp.ones((1, 1, time, 8), jnp.float32)
    program = run.lower(q, positions, keys, keys).compile()
    assert program.memory_analysis().temp_size_in_bytes < time * time * 4 / 4
