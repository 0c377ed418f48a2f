"""Laws of top-k and top-p: bisection over a sharded vocabulary keeps what sorting it would.

Idea: `truncate` against `sampling_twin.shortest_prefix`, bit by bit, on logits made of few values so that
ties abound. Data flow: random logits and weights → `truncate` → `inside` → mask = the twin's mask.

Worked example: four equal logits, top_p 0.5: ids 0 and 1 stay, on both sides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_engine.truncation import Columns, Truncation, inside, mass, no_cut, order_key, truncate, words
from inference_engine.vocab_shard import vocab_shard
from tests.sampling_twin import shortest_prefix

SLOTS, BITS = 6, 15
SIZES = (1, 2, 33)


@functools.cache
def _compiled(vocab: int) -> jax.stages.Wrapped:
    shard = vocab_shard(vocab, vocab)

    def kept(logits: jax.Array, weight: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        columns = Columns(logits, shard.ids.reshape(1, -1), order_key(logits), weight)
        wanted = jnp.ones(logits.shape[:1], jnp.bool_)
        total = mass(words(columns, no_cut(wanted), shard), shard)
        return inside(truncate(columns, Truncation(top_k, top_p, wanted), total, shard), columns)

    return jax.jit(kept)


def kept_by_both(logits: np.ndarray, top_k: list[int], top_p: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Masks of `truncate` and of the twin, with the weights of temperature 1."""
    with np.errstate(invalid="ignore"):
        weight = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    ours = _compiled(logits.shape[1])(
        jnp.asarray(logits), jnp.asarray(weight), jnp.array(top_k, jnp.int32), jnp.array(top_p, jnp.float32)
    )
    twin = [shortest_prefix(*row, BITS) for row in zip(logits, weight, top_k, top_p, strict=True)]
    return np.asarray(ours), np.stack(twin)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), vocab=st.sampled_from(SIZES), levels=st.integers(1, 40), seed=st.integers(0, 2**32 - 1)
)
def test_bisection_keeps_what_sorting_keeps(data: st.DataObject, vocab: int, levels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.array([*(rng.normal(0, 3, levels)), -np.inf], np.float32)
    logits = rng.choice(values, (SLOTS, vocab))
    logits[:, rng.integers(vocab)] = values[0]
    ks = data.draw(st.lists(st.integers(1, vocab) | st.just(-1), min_size=SLOTS, max_size=SLOTS))
    ps = data.draw(st.lists(st.floats(2.0**-20, 1, width=32), min_size=SLOTS, max_size=SLOTS))
    ours, twin = kept_by_both(logits, ks, ps)
    np.testing.assert_array_equal(ours, twin)


def test_any_float_has_its_place_in_the_order() -> None:
    """Tiny, huge, negative and infinite logits: top-k by bits is top-k by value."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, (SLOTS, 33), dtype=np.uint32)
    logits = bits.view(np.float32)
    logits = np.where(np.isfinite(logits) & (logits != 0), logits, -np.inf)
    ours, twin = kept_by_both(logits, [1, 2, 5, 15, 30, 33], [1.0] * SLOTS)
    np.testing.assert_array_equal(ours, twin)


def test_a_top_k_at_or_above_the_vocabulary_keeps_all_of_it() -> None:
    logits = np.random.default_rng(1).normal(size=(SLOTS, 33)).astype(np.float32)
    ours, _ = kept_by_both(logits, [33, 34, 1000, 2**31 - 1, -1, 0], [1.0] * SLOTS)
    assert ours.all()


def test_a_tie_at_the_edge_is_broken_by_the_lowest_ids() -> None:
    ours, _ = kept_by_both(
        np.zeros((SLOTS, 33), np.float32), [1, 2, 7, 33, -1, -1], [1.0, 1.0, 1.0, 1.0, 0.5, 1e-6]
    )
    assert ours.sum(axis=1).tolist() == [1, 2, 7, 33, 17, 1]
    assert all(row[: row.sum()].all() for row in ours)


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """Of weights 1, 1, 1, 1 and 29 more, half of the four that top-k left is two."""
    ours, _ = kept_by_both(np.zeros((SLOTS, 33), np.float32), [4] * SLOTS, [0.5] * SLOTS)
    assert (ours.sum(axis=1) == 2).all()


@pytest.mark.parametrize("top_p", [1e-6, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_one_possible_token_is_kept_whatever_top_p(top_p: float) -> None:
    logits = np.full((SLOTS, 33), -np.inf, np.float32)
    logits[:, 20] = -5.0
    ours, _ = kept_by_both(logits, [-1] * SLOTS, [top_p] * SLOTS)
    assert ours[:, 20].all()
    assert (ours.sum(axis=1) == 1).all()


def test_mass_is_exact_for_a_large_vocabulary() -> None:
    """Sums of a hundred thousand weights in words, against whole numbers of any size."""
    vocab = 100_000
    shard = vocab_shard(vocab, vocab)
    weight = np.random.default_rng(0).uniform(0, 1, (2, vocab)).astype(np.float32)
    columns = Columns(
        jnp.zeros((2, vocab)), shard.ids.reshape(1, -1), jnp.zeros((2, vocab), jnp.int32), jnp.asarray(weight)
    )
    halves = words(columns, no_cut(jnp.ones(2, jnp.bool_)), shard)
    sums = np.asarray(halves.sum(axis=-1)).astype(np.int64)
    bits = 31 - vocab.bit_length()
    exact = np.round(weight.astype(np.float64) * 2.0 ** (2 * bits)).astype(np.int64).sum(axis=1)
    np.testing.assert_array_equal(sums[:, 0] * 2**bits + sums[:, 1], exact)
    np.testing.assert_allclose(mass(halves, shard), exact, rtol=2e-7)
