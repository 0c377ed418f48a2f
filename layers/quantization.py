"""Weights as a leaf type: a plain array or int8 values with one scale per output channel.

A matmul of int8 weights is exact up to the rounding of the weights themselves: the integers are
contracted first, the scale multiplies the result, since it depends on the output channel alone.

Data flow: neutral state (unfolded float or int8) → `preprocess` → `Weight` leaves of `Params` →
`numerics.project`.

Worked example: the column (0.5, −2.54) has the scale 2.54/127 = 0.02 and the values (25, −127);
0.5 comes back as exactly 25 · 0.02.
"""

from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class Int8Weight:
    """int8 weights and their float32 scales, one an output channel (`[..., cols]`).

    The fields are `Any`: a pytree also carries shapes, specs and shardings.
    """

    qvalue: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that the pair stands for."""
        return self.qvalue.shape


Weight = jax.Array | Int8Weight
