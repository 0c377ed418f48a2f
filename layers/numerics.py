"""Matmuls of one device that accumulate in float32, and the activations and caps between them.

Softmax works in base 2 and swish through tanh, with their constants folded into the weights once, at
load: `exp(s) = exp2(s·log2 e)` takes log2(e) into the q weights, and with y = ½·(n W0), which takes ½
into W0, `swish(2y) = 2y·σ(2y) = y·(tanh y + 1)`.

One device stores a matrix output-major, `[cols, rows]`, and a few tokens are multiplied weight first: a CPU
then streams the weights from memory as they lie, instead of packing them anew for every step.

Worked example: n W0 = 2 is folded to y = 1, and 1·(tanh 1 + 1) = 1.7616 = swish(2).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from layers.hparams import Activation
from layers.quantization import Int8Weight, Weight

LOG2_E = math.log2(math.e)
SWISH_FOLD = 0.5

FEW_TOKENS = 64
"""Tokens up to which a CPU is faster weight first (measured: 2 × at 2 to 16, 1.1 × at 64, 0.85 × at 256)."""


@jax.named_scope("weights")
def project(
    x: Float[Array, "*batch rows"], weight: Weight, bias: Float[Array, " cols"] | None = None
) -> Float[Array, "*batch cols"]:
    """x · weight + bias, accumulated in float32 and returned in x's dtype.

    The weight is `[cols, rows]`; int8 values are scaled after the contraction.
    """
    matrix = weight.qvalue if isinstance(weight, Int8Weight) else weight
    y = output_major_product(x, matrix.astype(x.dtype))
    if isinstance(weight, Int8Weight):
        y = y * trailing(weight.scale, y.ndim)
    if bias is not None:
        y = y + trailing(bias, y.ndim)
    return y.astype(x.dtype)


def output_major_product(
    x: Float[Array, "*batch rows"], matrix: Float[Array, "cols rows"]
) -> Float32[Array, "*batch cols"]:
    """x · matrixᵀ, accumulated in float32."""
    if math.prod(x.shape[:-1]) > FEW_TOKENS:
        return _tokens_first(x, matrix)
    return lax.platform_dependent(x, matrix, cpu=_weight_first, default=_tokens_first)


def _tokens_first(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("...r,cr->...c", x, matrix, preferred_element_type=jnp.float32)


def _weight_first(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """The same with the weight on the left; the barrier keeps XLA from exchanging the two again."""
    tokens = x.reshape(-1, x.shape[-1])
    product = lax.dot_general(matrix, tokens, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(product).T.reshape(*x.shape[:-1], matrix.shape[0])


def trailing(vector: jax.Array, ndim: int) -> jax.Array:
    """A scale, bias or gain in float32, its dims the last of `ndim`: ranks are never promoted implicitly."""
    return vector.astype(jnp.float32).reshape((1,) * (ndim - vector.ndim) + vector.shape)


def softcap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap·tanh(x/cap); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _swish_folded(y: jax.Array) -> jax.Array:
    return y * (jnp.tanh(y) + 1.0)


def _gelu_tanh(y: jax.Array) -> jax.Array:
    return jax.nn.gelu(y, approximate=True)


def _gelu_erf(y: jax.Array) -> jax.Array:
    return jax.nn.gelu(y, approximate=False)


_NONLINEARITY = {
    Activation.SWISH_GATED: _swish_folded,
    Activation.GELU_TANH_GATED: _gelu_tanh,
    Activation.GELU_ERF_GATED: _gelu_erf,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_ERF: _gelu_erf,
}


def ff_hidden(act: Activation, projected: Float[Array, "*batch cols"]) -> Float[Array, "*batch ff"]:
    """The feed-forward hidden layer from its input projection.

    `projected` is `[..., W0 | W1]` for gated activations and `[..., W0]` for plain ones. For
    SWISH_GATED the W0 half arrives halved (see the module's docstring).
    """
    nonlinearity = _NONLINEARITY[act]
    if not act.gated:
        return nonlinearity(projected)
    gate, value = jnp.split(projected, 2, axis=-1)
    return nonlinearity(gate) * value
