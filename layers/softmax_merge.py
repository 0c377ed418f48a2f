"""Joining softmax results over disjoint sets of keys.

Attention over some keys is kept as a normalised output and the log-sum-exp of its scores; two of them are
joined by weighing the outputs with their share of all weight. Both obvious one-line formulas fail where
there is nothing: `lse − max(lse)` is NaN for two empty parts, and a sigmoid of the difference sees no
difference between an empty part and a finite sentinel. Here an empty part is −inf, or at most `EMPTY` for
kernels that compute with a sentinel; it weighs exactly nothing, whatever its output holds.

Data flow: parts (output, lse), float32 → share of each → joined output, lse; gradients are finite everywhere.

Worked example: lse 0 with output 1 and lse log 3 with output 5 join to log 4 with output (1 + 3·5)/4 = 4.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

EMPTY = -1e38
"""A log-sum-exp at or below this means: no key was seen."""


@flax.struct.dataclass
class Partial:
    """Attention over some of the keys.

    Attributes:
      output: `[batch, time, heads, qkv]` float32, normalised over the keys seen.
      lse: `[batch, time, heads]` float32, natural log of the sum of e^score, −inf where no key was seen.
    """

    output: jax.Array
    lse: jax.Array


def is_empty(lse: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Where a log-sum-exp says that no key was seen."""
    return lse <= EMPTY


def merge(first: Partial, second: Partial) -> Partial:
    """One softmax over the keys of both; zero and −inf where neither saw a key. Symmetric."""
    empty = is_empty(first.lse) & is_empty(second.lse)
    base = jnp.where(empty, 0.0, lax.stop_gradient(jnp.maximum(first.lse, second.lse)))
    weights = [_weight(part.lse, base) for part in (first, second)]
    total = jnp.where(empty, 1.0, weights[0] + weights[1])
    shares = [weight / total for weight in weights]
    output = shares[0][..., None] * _output(first) + shares[1][..., None] * _output(second)
    return Partial(output, jnp.where(empty, -jnp.inf, base + jnp.log(total)))


def _weight(lse: jax.Array, base: jax.Array) -> Float32[Array, "..."]:
    """e^(lse − base), 0 for an empty part; the inner select keeps its gradient finite."""
    empty = is_empty(lse)
    return jnp.where(empty, 0.0, jnp.exp(jnp.where(empty, 0.0, lse - base)))


def _output(part: Partial) -> Float32[Array, "..."]:
    """The output, zero where it stands for no key."""
    return jnp.where(is_empty(part.lse)[..., None], 0.0, part.output)
