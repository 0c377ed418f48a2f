"""Products of activations with one chunk of a stored weight, read where it lies.

Weights lie chunk-major, `[chunks, rows, cols]` or stacked `[layers, chunks, rows, cols]`. A chunk is cut
by one dynamic slice over the leading dims and fed straight to the matmul, which XLA fuses, so that no
copy of a layer is ever made; a part of a chunk is a static slice of that. Stored int8 or another float
dtype is cast to the activation's at use.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Num

Index = int | Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A chip's weight `[chunks, rows, cols]`, maybe one layer of a stack, and its products."""

    w: Num[Array, "*layers chunks rows cols"]
    layer: Index | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Chunks, rows, cols."""
        chunks, rows, cols = self.w.shape[-3:]
        return chunks, rows, cols

    def all(self) -> Num[Array, "chunks rows cols"]:
        """Every chunk (of the layer)."""
        return self._cut(None, (0, 0), self.shape)

    def dot(
        self,
        x: Float[Array, "*batch rows"],
        chunk: Index,
        cols: tuple[int, int] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Float32[Array, "*batch part"]:
        """x @ w[chunk][rows, cols], accumulated in float32; cols and rows are (start, stop)."""
        cols = cols or (0, self.shape[2])
        rows = rows or (0, self.shape[1])
        w = self._cut(chunk, (rows[0], cols[0]), (1, rows[1] - rows[0], cols[1] - cols[0]))[0]
        return jnp.einsum("...r,rc->...c", x, w.astype(x.dtype), preferred_element_type=jnp.float32)

    def _cut(self, chunk: Index | None, start: tuple[int, int], sizes: tuple[int, int, int]) -> Array:
        starts: tuple[Index, ...] = (0 if chunk is None else chunk, *start)
        if self.layer is not None:
            starts, sizes = (self.layer, *starts), (1, *sizes)
        cut = lax.dynamic_slice(
            self.w, [jnp.asarray(s, jnp.int32) for s in starts], sizes, allow_negative_indices=False
        )
        return cut[0] if self.layer is not None else cut
