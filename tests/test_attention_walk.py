"""Laws of the walk over tiles: it equals all scores at once, visits what is needed, and stays small."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.attention_blocks import ReferenceBlocks
from layers.attention_walk import Tiles, XlaBlocks, needed_range
from layers.ring_attention import AttentionForm, ring_attention, ring_attention_with_lse
from layers.ring_schedule import Reach, TokenOrder, zigzag_permutation
from tests.attention_oracle import Problem


def test_tiles_are_even_and_bounded() -> None:
    assert Tiles.of(1000, 256) == Tiles(1000, 250, 4)
    assert Tiles.of(5, 256) == Tiles(5, 5, 1)
    assert Tiles.of(7, 3) == Tiles(7, 3, 3)


@pytest.mark.parametrize("tiles", [XlaBlocks(1, 1), XlaBlocks(5, 16), XlaBlocks(64, 4), XlaBlocks(7, 6)])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_tile_sizes_change_nothing(tiles: XlaBlocks, cap: float | None, rng: np.random.Generator) -> None:
    problem = Problem.random(rng, 11, 16)
    form = AttentionForm(window_size=(6, 2), soft_cap=cap)

    @jax.jit
    def run(problem: Problem, plain: bool = False) -> tuple[jax.Array, ...]:
        found = []
        for kernel in (tiles, ReferenceBlocks()):
            chosen = dataclasses.replace(form, kernel=kernel)
            results, backward = jax.vjp(
                lambda q, k, v, chosen=chosen: ring_attention_with_lse(q, k, v, (), chosen),
                *(problem.q, problem.k, problem.v),
            )
            found.append((*results, *backward((problem.d_output, problem.d_lse))))
        return tuple(found)

    for a, b in zip(*run(problem), strict=True):
        assert np.max(np.abs(a - b)) <= 2e-6 * np.max(np.abs(b))


def _places(positions: np.ndarray, segments: np.ndarray | int = 0) -> jax.Array:
    row = np.stack([positions, np.broadcast_to(segments, positions.shape)])
    return jnp.asarray(row[None], jnp.int32)


@pytest.mark.parametrize(
    ("window", "rows", "expected"),
    [
        ((-1, 0), (0, 4), (0, 1)),
        ((-1, 0), (8, 12), (0, 3)),
        ((3, 0), (8, 12), (1, 3)),
        ((0, 0), (9, 10), (2, 3)),
        ((-1, -1), (0, 1), (0, 4)),
        ((2, -1), (15, 16), (3, 4)),
    ],
)
def test_only_needed_tiles_are_walked(
    window: tuple[int, int], rows: tuple[int, int], expected: tuple[int, int]
) -> None:
    reach = Reach.of(False, window)
    bounds = jnp.asarray([reach.left, reach.right], jnp.int32)
    found = needed_range(_places(np.arange(*rows)), _places(np.arange(16)), bounds, Tiles.of(16, 4))
    assert tuple(map(int, found)) == expected


def test_other_segments_and_padding_are_not_walked() -> None:
    free = jnp.asarray([2**30, 2**30], jnp.int32)
    segments = np.repeat([0, 1, 2, -1], 4)
    keys = _places(np.arange(16), segments)
    found = needed_range(_places(np.arange(4), 1), keys, free, Tiles.of(16, 4))
    assert tuple(map(int, found)) == (1, 2)
    low, high = needed_range(_places(np.arange(4), -1), keys, free, Tiles.of(16, 4))
    assert int(low) == int(high)


def test_zigzag_gives_every_chip_the_same_causal_work() -> None:
    chips, length, tile = 8, 2048, 16
    bounds = jnp.asarray([2**30, 0], jnp.int32)
    work = {}
    for order in TokenOrder:
        text = zigzag_permutation(length, chips) if order is TokenOrder.ZIGZAG else np.arange(length)
        held = text.reshape(chips, -1)
        tiles = Tiles.of(length // chips, tile)

        @jax.jit
        def walked(q: jax.Array, k: jax.Array, tiles: Tiles = tiles) -> jax.Array:
            low, high = jax.vmap(lambda row: needed_range(row[None], k, bounds, tiles))(
                jnp.moveaxis(q.reshape(2, tiles.count, tile), 1, 0)
            )
            return jnp.sum(high - low)

        pairs = [[int(walked(_places(q)[0], _places(k))) for k in held] for q in held]
        work[order] = np.sum(pairs, axis=1)
    busiest = {order: counts.max() / counts.mean() for order, counts in work.items()}
    assert busiest[TokenOrder.ZIGZAG] <= 1.1
    assert busiest[TokenOrder.CONTIGUOUS] > 1.7  # what zigzag is for


def test_no_time_by_time_array_exists() -> None:
    time = 4096
    form = AttentionForm(is_causal=True)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(ring_attention(q, k, v, (), form))

    shapes = [jax.ShapeDtypeStruct((1, time, heads, 16), jnp.float32) for heads in (4, 1, 1)]
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    assert program.memory_analysis().temp_size_in_bytes < time * time * 4 / 2
