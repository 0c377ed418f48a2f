"""Laws of joining softmax results: nothing weighs nothing, and gradients stay finite."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.softmax_merge import Partial, merge

INF = math.inf
JOINED = [
    ((-INF, 0.0), 0.0),
    ((0.0, -INF), 0.0),
    ((-INF, -INF), -INF),
    ((0.0, 200.0), 200.0),
    ((-200.0, 200.0), 200.0),
    ((-2.4e38, -2.4e38), -INF),
    ((-2.4e38, 5.0), 5.0),
    ((5.0, -2.4e38), 5.0),
    ((-2.4e38, -INF), -INF),
    ((0.0, math.log(3.0)), math.log(4.0)),
]
PAIRS = pytest.mark.parametrize(("pair", "joined"), JOINED)


def _part(lse: float, output: float) -> Partial:
    return Partial(jnp.full((1, 1, 1, 2), output), jnp.full((1, 1, 1), lse))


@PAIRS
def test_log_sum_exps_join(pair: tuple[float, float], joined: float) -> None:
    done = merge(_part(pair[0], 1.0), _part(pair[1], 5.0))
    assert done.lse.item() == pytest.approx(joined, rel=1e-6, abs=0)
    shares = [0.0 if lse < -1e38 else math.exp(lse - joined) for lse in pair]
    assert np.allclose(done.output, 1.0 * shares[0] + 5.0 * shares[1], rtol=1e-6)


@PAIRS
def test_order_does_not_matter(pair: tuple[float, float], joined: float) -> None:
    parts = _part(pair[0], 1.0), _part(pair[1], 5.0)
    one, other = merge(*parts), merge(*parts[::-1])
    assert np.array_equal(one.lse, other.lse)
    assert np.allclose(one.output, other.output, rtol=1e-7)


@PAIRS
def test_gradients_are_finite_and_right(pair: tuple[float, float], joined: float) -> None:
    def total(lse: jax.Array, output: jax.Array) -> jax.Array:
        done = merge(*(Partial(output[i].reshape(1, 1, 1, 1), lse[i].reshape(1, 1, 1)) for i in range(2)))
        return jnp.sum(done.output) + jnp.sum(jnp.where(jnp.isneginf(done.lse), 0.0, done.lse))

    outputs = np.array([1.0, 5.0], np.float32)
    d_lse, d_output = jax.grad(total, argnums=(0, 1))(jnp.asarray(pair), jnp.asarray(outputs))
    shares = np.array([0.0 if lse < -1e38 else math.exp(lse - joined) for lse in pair])
    assert np.allclose(d_output, shares, atol=1e-6)
    assert np.allclose(d_lse, shares * (1 + outputs - shares @ outputs), atol=1e-5)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_the_output_of_nothing_does_not_count(garbage: float) -> None:
    assert np.all(merge(_part(-INF, garbage), _part(0.0, 5.0)).output == 5.0)
    assert np.all(merge(_part(-INF, garbage), _part(-2.4e38, garbage)).output == 0.0)


def test_any_order_of_many_parts_is_one_softmax(rng: np.random.Generator) -> None:
    scores, values = rng.normal(size=4).astype(np.float32) * 9, rng.normal(size=4).astype(np.float32)
    weights = np.exp(scores.astype(np.float64) - scores.max())
    expected = np.sum(weights * values) / np.sum(weights)
    for order in itertools.permutations(range(4)):
        done = _part(-INF, np.nan)
        for i in order:
            done = merge(done, _part(float(scores[i]), float(values[i])))
        assert np.allclose(done.output, expected, rtol=2e-6)
