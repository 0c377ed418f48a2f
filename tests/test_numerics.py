"""Laws of `layers.numerics`: how a product is ordered changes its speed alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.numerics import FEW_TOKENS, output_major_product

ROWS, COLS = 24, 40


def _operands(tokens: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, 1, ROWS)), jnp.float32)
    return x, jnp.asarray(rng.standard_normal((COLS, ROWS)), jnp.float32)


@pytest.mark.parametrize("tokens", [1, 3, FEW_TOKENS, FEW_TOKENS + 1])
def test_a_product_is_x_times_the_transposed_matrix(tokens: int) -> None:
    x, matrix = _operands(tokens)
    wanted = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
    np.testing.assert_allclose(jax.jit(output_major_product)(x, matrix), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tokens", "weight_first"), [(3, True), (FEW_TOKENS + 1, False)])
def test_a_cpu_multiplies_few_tokens_weight_first(tokens: int, weight_first: bool) -> None:
    program = jax.jit(output_major_product).lower(*_operands(tokens)).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program)
    assert shapes == [f"{COLS},{tokens}" if weight_first else f"{tokens},{COLS}"]


def test_a_product_of_bfloat16_accumulates_in_float32() -> None:
    x, matrix = (operand.astype(jnp.bfloat16) for operand in _operands(2))
    wanted = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
    product = output_major_product(x, matrix)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, wanted, rtol=0, atol=2e-5)
