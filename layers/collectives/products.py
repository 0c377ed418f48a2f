"""Products of activations with one chunk of a stored weight, read where it lies.

Weights lie chunk-major, `[chunks, rows, cols]`, or stacked, `[layers, chunks, rows, cols]`. A chunk is cut
by one dynamic slice over the leading dims and goes straight into the matmul, with which XLA fuses it, so
that no copy of a layer is made; half a chunk is the same slice with a fixed offset. Weights stored in
int8 or in another float dtype are cast to the activation's dtype at use; int8 scales belong to the
caller, after the reduction.

Worked example: 8B on 4,4,1 stores the query and feed-forward columns as [32, 4, 1024, 2304] a chip;
layer 7, chunk 2 is a slice of 1 × 1 × 1024 × 2304, 4.7 MB in bfloat16.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Num

from layers.collectives.ring import Index


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of rows or columns of a chunk."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A chip's weight, or one layer of a stack of them, and its products.

    Attributes:
      w: [chunks, rows, cols], or [layers, chunks, rows, cols] with a `layer`.
      layer: index of the layer, None for a weight without that dim.

    Raises:
      ValueError: a stack without a layer, or a layer without a stack.
    """

    w: Num[Array, "*layers chunks rows cols"]
    layer: Index | None = None

    def __post_init__(self) -> None:
        if self.w.ndim != (3 if self.layer is None else 4):
            raise ValueError(
                f"weight of shape {self.w.shape} with layer={self.layer!r}; allowed: [chunks, rows, cols] "
                "without a layer, [layers, chunks, rows, cols] with one"
            )

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return self.w.shape[-2]

    @property
    def cols(self) -> int:
        """Columns of a chunk."""
        return self.w.shape[-1]

    def check(self, chunks: int, rows: int) -> None:
        """Raise ValueError unless there are `chunks` chunks of `rows` rows."""
        if self.w.shape[-3:-1] != (chunks, rows):
            raise ValueError(
                f"weight of shape {self.w.shape} for a ring of {chunks} and x of width {rows}; "
                f"allowed: [..., {chunks}, {rows}, cols]"
            )

    def all(self, dtype: jnp.dtype) -> Float[Array, "chunks rows cols"]:
        """Every chunk, cast."""
        w = self.w if self.layer is None else lax.dynamic_index_in_dim(self.w, self.layer, keepdims=False)
        return w.astype(dtype)

    def dot(
        self,
        x: Float[Array, "*batch rows"],
        chunk: Int[Array, ""],
        *,
        rows: Part | None = None,
        cols: Part | None = None,
    ) -> Float32[Array, "*batch cols"]:
        """x @ w[chunk][rows, cols], accumulated in float32; all rows and columns by default."""
        rows, cols = rows or Part(0, self.rows), cols or Part(0, self.cols)
        starts, sizes = [chunk, rows.start, cols.start], [1, rows.width, cols.width]
        if self.layer is not None:
            starts, sizes = [self.layer, *starts], [1, *sizes]
        starts = [jnp.asarray(start, jnp.int32) for start in starts]
        w = lax.dynamic_slice(self.w, starts, sizes, allow_negative_indices=False)
        w = w.reshape(rows.width, cols.width).astype(x.dtype)
        return jnp.einsum("...r,rc->...c", x, w, preferred_element_type=jnp.float32)


def halves(width: int) -> tuple[Part, Part]:
    """A width cut in two, the first part the longer; at a TPU's 128 lanes if the width is made of them."""
    lanes = 128
    unit = lanes if width % lanes == 0 and width > lanes else 1
    middle = -(-width // (2 * unit)) * unit
    return Part(0, middle), Part(middle, width)
