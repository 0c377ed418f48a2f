"""Keys and values in int8, with a float32 scale for each kv head and position.

A scale belongs to all numbers of one head at one position, so it leaves both contractions of attention: it
multiplies a score, or the weight of a value, and int8 numbers go into the matmuls as they are. int8 fits
exactly into float32 and bfloat16, so nothing but the rounding of the cache itself is lost.

xPos shrinks keys by e^± far from its centre. Kept so, the dims of one key would differ by more than int8
can hold; keys are kept before it, and `key_rates` says how to shrink them at read (rope.py).

Data flow: k or v of a step → `quantize_kv` → `KVCache` → attention's blocks.

Worked example: the key (0.5, -2.54) has the scale 2.54/127 = 0.02 and the values (25, -127). With 64 numbers
a head, a position takes 64 + 4 bytes instead of 256.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = 127


@flax.struct.dataclass
class QuantizedKV:
    """int8 `[..., qkv]` and float32 scales `[...]`, one for each kv head and position.

    The fields are `Any`: a pytree also carries shapes, specs and shardings.
    """

    qvalue: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that the pair stands for."""
        return self.qvalue.shape


def quantize_kv(x: Float[Array, "*lead qkv"]) -> QuantizedKV:
    """Rounds to the nearest of 255 steps; what is not finite makes its head and position NaN when read."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / LARGEST
    step = jnp.where(scale > 0, scale, 1.0)[..., None]
    return QuantizedKV(jnp.round(wide / step).astype(jnp.int8), scale)
