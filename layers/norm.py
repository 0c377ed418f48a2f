"""Normalisation over the embed dim (or a head's width), in float32 whatever the activations are.

Where weights are float, a norm's gain is folded at load into the matrices that read it, and the gain here
is None. Gains stay at run time for int8 weights, for norms with a bias and for the final norm of a tied
model.

Worked example: RMS of (3, 4) is sqrt((9 + 16)/2) = 3.5355; normalised (0.8485, 1.1314).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from layers.hparams import Norm
from layers.numerics import trailing


@flax.struct.dataclass
class NormParams:
    """Gain and bias `[embed]`, each None where there is nothing to apply.

    The fields are `Any`: a pytree also carries shapes, specs and shardings.
    """

    gain: Any = None
    bias: Any = None


def normalize(x: Float[Array, "*batch dim"], kind: Norm, eps: float) -> Float[Array, "*batch dim"]:
    """x over its root mean square, or its deviation over the standard deviation; float32."""
    x = x.astype(jnp.float32)
    if kind is Norm.LAYER:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def scale_and_shift(x: Float[Array, "*batch dim"], params: NormParams) -> Float[Array, "*batch dim"]:
    """Applies what of gain and bias there is; shapes broadcast over the leading dims."""
    if params.gain is not None:
        x = x * trailing(params.gain, x.ndim)
    if params.bias is not None:
        x = x + trailing(params.bias, x.ndim)
    return x


def apply_norm(
    x: Float[Array, "*batch dim"], params: NormParams, kind: Norm, eps: float
) -> Float[Array, "*batch dim"]:
    """Normalises, scales and shifts in float32; returns x's dtype."""
    return scale_and_shift(normalize(x, kind, eps), params).astype(x.dtype)
