"""Laws of attention over a ring: equal to float64 attention on one device, whatever the ring, order and mask.

Idea: one compiled program per ring takes mask and window as numbers, and runs every case; what a case may
see is restated in `attention_oracle`. Tolerances relative to the largest number: 2e-6 forward, 1e-5 for
gradients.

Worked example: 3 chips in zigzag with 12 tokens hold 0,1,10,11 · 2,3,8,9 · 4,5,6,7.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attention_blocks import ReferenceBlocks
from layers.attention_walk import XlaBlocks
from layers.ring_attention import AttentionForm, TokenPlaces, ring_attention, ring_attention_with_lse
from layers.ring_schedule import Reach, TokenOrder
from tests.attention_oracle import Problem, assert_equal, mask_of, results
from tests.ring_runs import RingRun, grid, line, static_window

SIZES = (1, 2, 3, 4, 8)
CHUNK = 6
WALK = XlaBlocks(queries=4, keys=3)
SOME_LONG = [pytest.param(n, marks=[pytest.mark.long] if n in (1, 4, 8) else []) for n in SIZES]
MASKS = [(False, (-1, -1)), (True, (-1, -1))] + [
    (is_causal, (w, w)) for is_causal, w in itertools.product((False, True), (0, 1, 4, 6, 7))
]


def _text_segments(rng: np.random.Generator, chips: int) -> np.ndarray:
    """Row 0: lengths 1, to the end of the first shard, across shards, padding. Row 1: many short ones."""
    length = CHUNK * chips
    row = np.full(length, 2)
    row[0], row[1:CHUNK] = 0, 1
    row[-2:] = -1
    return np.stack([row, np.sort(rng.integers(0, 3 * chips, length))])


@pytest.mark.parametrize("chips", SIZES)
def test_a_ring_equals_one_device(chips: int, rng: np.random.Generator) -> None:
    run, length = RingRun(line(chips), kernel=WALK), CHUNK * chips
    problem = Problem.random(rng, length, length)
    for is_causal, window in MASKS:
        mask = mask_of(length, length, is_causal=is_causal, window=window)
        found = run(problem, Reach.of(is_causal, window))
        assert_equal(found, results(problem, mask), (is_causal, window))
    segments = _text_segments(rng, chips)
    for window in ((-1, -1), (4, 0)):
        mask = mask_of(length, length, window=window, q_segments=segments, k_segments=segments)
        found = run(problem, Reach.of(False, window), q_segments=segments, k_segments=segments)
        assert_equal(found, results(problem, mask), ("segments", window))
    for lengths in ([0, length], [1, CHUNK], [length - CHUNK, length - 1]):
        mask = mask_of(length, length, is_causal=True, lengths=np.array(lengths))
        found = run(problem, Reach.of(True), lengths=np.array(lengths))
        assert_equal(found, results(problem, mask), lengths)


@pytest.mark.parametrize("chips", SOME_LONG)
@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2)])
def test_more_keys_than_queries_and_fewer(
    chips: int, queries: int, keys: int, rng: np.random.Generator
) -> None:
    run = RingRun(line(chips), cap=1.5)
    problem = Problem.random(rng, queries * chips, keys * chips)
    for is_causal, window in MASKS[:6]:
        mask = mask_of(queries * chips, keys * chips, is_causal=is_causal, window=window)
        found = run(problem, Reach.of(is_causal, window))
        assert_equal(found, results(problem, mask, cap=1.5), (is_causal, window))


@pytest.mark.parametrize("chips", SOME_LONG)
def test_zigzag_equals_one_device(chips: int, rng: np.random.Generator) -> None:
    run, length = RingRun(line(chips), order=TokenOrder.ZIGZAG, kernel=WALK), CHUNK * chips
    problem = Problem.random(rng, length, length)
    segments = _text_segments(rng, chips)
    for is_causal, window in MASKS[:7]:
        mask = mask_of(
            length, length, is_causal=is_causal, window=window, q_segments=segments, k_segments=segments
        )
        found = run(problem, Reach.of(is_causal, window), q_segments=segments, k_segments=segments)
        assert_equal(found, results(problem, mask), (is_causal, window))


@pytest.mark.parametrize(
    ("chips", "window"), [(4, (0, 0)), (4, (5, 0)), (4, (6, -1)), (3, (2, 7)), (4, (1, 1))]
)
def test_a_ring_cut_to_an_arc_equals_the_whole_ring(
    chips: int, window: tuple[int, int], rng: np.random.Generator
) -> None:
    length = CHUNK * chips
    problem = Problem.random(rng, length, length)
    is_causal = window[1] == -1
    mask = mask_of(length, length, is_causal=is_causal, window=window)
    found = static_window(problem, line(chips), is_causal, window, ReferenceBlocks())
    assert_equal(found, results(problem, mask), window)


@pytest.mark.parametrize(
    "run",
    [
        RingRun(grid(2, 4), axes=("y",), batch_axes=("x",)),
        RingRun(grid(4, 2), axes=("x",), batch_axes=("y",)),
        RingRun(grid(2, 4), axes=("y", "x")),
        RingRun(grid(4, 2), axes=("x", "y")),
    ],
    ids=["batch.x, time.y", "batch.y, time.x", "time.yx", "time.xy"],
)
def test_any_axes_of_a_mesh_make_a_ring(run: RingRun, rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 24, 24)
    for is_causal, window in ((True, (-1, -1)), (False, (4, 1))):
        mask = mask_of(24, 24, is_causal=is_causal, window=window)
        assert_equal(run(problem, Reach.of(is_causal, window)), results(problem, mask), (is_causal, window))


@pytest.mark.parametrize("chips", [3, 8])
@pytest.mark.parametrize("order", TokenOrder, ids=lambda order: order.value)
def test_no_token_and_no_head_is_taken_for_another(chips: int, order: TokenOrder) -> None:
    """A window of one key makes a query return exactly the value at its own position."""
    length = 2 * chips
    codes = np.arange(2 * length * 2 * 8).reshape(2, length, 2, 8).astype(np.float32)
    q, d_output = np.zeros((2, length, 4, 8), np.float32), np.ones((2, length, 4, 8), np.float32)
    problem = Problem(q, codes, codes, d_output, q[..., 0])
    found = RingRun(line(chips), order=order)(problem, Reach.of(False, (0, 0)))
    assert np.array_equal(found["output"], np.repeat(codes, 2, axis=2))
    assert np.array_equal(found["dv"], np.full_like(codes, 2))  # two query heads, each with a gradient of 1


def _poisoned(problem: Problem, rows: np.ndarray, columns: np.ndarray) -> Problem:
    row, column = rows[:, :, None, None], columns[:, :, None, None]
    bad = np.array([np.nan, np.inf, -np.inf, 1e38], np.float32)[np.arange(problem.q.shape[3]) % 4]
    return Problem(
        np.where(row, bad, problem.q),
        np.where(column, bad, problem.k),
        np.where(column, bad[::-1], problem.v),
        np.where(row, bad, problem.d_output),
        np.where(rows[:, :, None], np.nan, problem.d_lse),
    )


@pytest.mark.parametrize("kernel", [ReferenceBlocks(), WALK], ids=["reference", "walk"])
@pytest.mark.parametrize("chips", [1, 3])
def test_what_nobody_may_see_reaches_nothing(
    chips: int, kernel: ReferenceBlocks | XlaBlocks, rng: np.random.Generator
) -> None:
    run, length = RingRun(line(chips), kernel=kernel), 8 * chips
    problem = Problem.random(rng, length, length)
    segments = np.zeros((2, length), int)
    segments[:, length // 2 :] = 1
    segments[0, -3:] = -1  # padding
    k_segments = segments.copy()
    k_segments[1, 2] = 7  # a segment that no query is in
    lengths = np.array([length, length - 2])
    hidden = (k_segments < 0) | (k_segments == 7) | (np.arange(length)[None, :] >= lengths[:, None])
    options = {"q_segments": segments, "k_segments": k_segments, "lengths": lengths}
    clean = run(problem, Reach.of(True), **options)
    found = run(_poisoned(problem, segments < 0, hidden), Reach.of(True), **options)
    for name, array in clean.items():
        assert np.array_equal(found[name], array), name
        assert np.all(np.isfinite(array) | np.isneginf(array)), name
    assert np.all(found["output"][0, -3:] == 0)
    assert np.all(np.isneginf(found["lse"][0, -3:]))
    mask = mask_of(length, length, is_causal=True, **options)
    assert_equal(found, results(_poisoned(problem, segments < 0, hidden), mask))


def test_bfloat16_loses_no_more_on_a_ring(rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 48, 48, qkv=16)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (problem.q, problem.k, problem.v))
    form = AttentionForm(is_causal=True, kernel=XlaBlocks(queries=6, keys=6))

    def loss(mesh_size: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        ring = jax.shard_map(
            lambda q, k, v: ring_attention(q, k, v, "x", form),
            mesh=line(mesh_size),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
        )
        output = ring(q, k, v).astype(jnp.float32)
        return jnp.sum(output * jnp.asarray(problem.d_output)), output

    def run(mesh_size: int, *arrays: jax.Array) -> list[np.ndarray]:
        step = jax.jit(jax.grad(lambda *a: loss(mesh_size, *a), argnums=(0, 1, 2), has_aux=True))
        gradients, output = step(*arrays)
        return [np.asarray(x, np.float32) for x in (output, *gradients)]

    exact = run(1, *(x.astype(jnp.float32) for x in (q, k, v)))
    alone, ring = run(1, q, k, v), run(8, q, k, v)
    for a, b, reference in zip(ring, alone, exact, strict=True):
        assert np.linalg.norm(a - reference) <= 1.15 * np.linalg.norm(b - reference)


def test_chunks_of_queries_give_what_one_shot_gives(rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 12, 12)
    whole = results(problem, mask_of(12, 12, is_causal=True))["output"]
    attend = jax.jit(lambda *arrays: ring_attention(*arrays, (), AttentionForm(is_causal=True, kernel=WALK)))
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        arrays = (problem.q[:, start:stop], problem.k[:, :stop], problem.v[:, :stop])
        part = attend(*map(jnp.asarray, arrays))
        assert np.allclose(part, whole[:, start:stop], atol=2e-6), (start, stop)


def test_given_positions_are_used(rng: np.random.Generator) -> None:
    problem, order = Problem.random(rng, 12, 12), rng.permutation(12)
    expected = results(problem, mask_of(12, 12, is_causal=True))
    places = TokenPlaces(*(jnp.asarray(np.stack([order] * 2), jnp.int32),) * 2)
    form = AttentionForm(is_causal=True, kernel=ReferenceBlocks())
    ring = jax.jit(
        jax.shard_map(
            lambda q, k, v, *at: ring_attention_with_lse(q, k, v, "x", form, TokenPlaces(*at)),
            mesh=line(3),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
        )
    )
    output, lse = ring(*(x[:, order] for x in (problem.q, problem.k, problem.v)), *places[:2])
    assert np.allclose(output, expected["output"][:, order], atol=2e-6)
    assert np.allclose(lse, expected["lse"][:, order], atol=2e-6)


def test_heads_that_do_not_divide_are_refused(rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 4, 4, heads=3)
    with pytest.raises(ValueError, match="3 query heads over 2 kv heads"):
        ring_attention(*map(jnp.asarray, (problem.q, problem.k, problem.v)), ())
