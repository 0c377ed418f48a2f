"""The order in which a mesh, or one device, stores the matrices of a layer.

On one device matrices are stored output-major, `[cols, rows]` (`layers.numerics` says why): those that read
the same input stand above each other, k and v between q and W0, and those whose outputs are added stand next
to each other. Few large products read memory faster than many small ones. On a mesh
they are cut into chunks, one a chip in (y, z, x) order, each with its share of every part, and stored
chunk-major with plain two-dimensional chunks: a collective matmul then indexes leading dims only, and no
chip ever copies or re-lays a weight.

  2D  in  [chunks, embed, cols]          chunks over (y, z), embed over x
      out [chunks, rows, embed]          chunks over (y, z), embed over x
  1D  in  [chunks·X, embed/X, cols]      leading dim over (y, z, x)
      out [chunks·X, rows, embed/X]      leading dim over (y, z, x)

In both a chip holds `[X, rows, cols]`: in 2D the X chunks are the output columns (or input rows) that belong
to its x neighbours, in 1D they are the slices of embed that live there.

Data flow: neutral leaves → heads padded and ordered (`HeadArrangement`) → folding → `beside`, `below`.

Worked example: q of 8 heads of 32 and W0, W1 of 960 on 2,2,2: a chunk has 32 + 120 + 120 columns, so 2D `wi`
is [8, 240, 272] and a chip holds [2, 120, 272].
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.state import QuantizedTensor
from layers.head_order import PaddedHeads, padded_heads
from layers.hparams import HParams
from layers.layout import WeightStorage
from layers.mesh_shape import MeshShape
from layers.quantization import Int8Weight, Weight

Leaves = Mapping[str, Any]


@runtime_checkable
class Storage(Protocol):
    """Where the parts of a fused matrix go."""

    def arrange_heads(self, hparams: HParams, leaves: Leaves) -> tuple[HParams, Leaves]:
        """A layer's leaves with heads padded and ordered, and the HParams that say so."""

    def beside(self, parts: Sequence[Weight]) -> Weight:
        """Fuses matrices `[rows, cols]` that read the same input."""

    def keys_values(self, parts: Sequence[Weight]) -> Weight | None:
        """Fuses the projections of k and v, `[rows, cols]` each; None where they go beside that of q."""

    def below(self, parts: Sequence[Weight]) -> Weight:
        """Fuses matrices `[rows, cols]` whose outputs are added."""

    def vectors(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Fuses vectors laid out as the columns of `beside`."""

    def pad_vocab(self, table: jax.Array) -> jax.Array:
        """Pads the leading vocabulary dim with zeros."""


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Plain matrices, nothing padded."""

    def arrange_heads(self, hparams: HParams, leaves: Leaves) -> tuple[HParams, Leaves]:
        """Nothing to do."""
        return hparams, leaves

    def beside(self, parts: Sequence[Weight]) -> Weight:
        """`[all cols, rows]`."""
        return _output_major(_join(parts, axis=-1))

    def keys_values(self, parts: Sequence[Weight]) -> None:
        """They read the same input as q, and each product more costs time."""

    def below(self, parts: Sequence[Weight]) -> Weight:
        """`[cols, all rows]`."""
        return _output_major(_join(parts, axis=-2))

    def vectors(self, parts: Sequence[jax.Array]) -> jax.Array:
        """`[all cols]`."""
        return jnp.concatenate(parts)

    def pad_vocab(self, table: jax.Array) -> jax.Array:
        """Nothing to do."""
        return table


@dataclasses.dataclass(frozen=True)
class ChunkMajor:
    """Chunks for an x × y × z mesh; see the module's docstring."""

    order: WeightStorage
    mesh: MeshShape

    @property
    def embed_chunks(self) -> int:
        """Parts of embed that stand in the leading dim."""
        return self.mesh.x if self.order is WeightStorage.ONE_D else 1

    def arrange_heads(self, hparams: HParams, leaves: Leaves) -> tuple[HParams, Leaves]:
        """Pads and orders heads as `layers.head_order` says."""
        heads = padded_heads(hparams, self.mesh.x, self.mesh.y, self.mesh.z)
        arranged = {
            name: _arrange(leaf, heads, *_HEAD_DIMS[name]) if name in _HEAD_DIMS else leaf
            for name, leaf in leaves.items()
        }
        return dataclasses.replace(hparams, heads=heads.heads, kv_heads=heads.kv_heads), arranged

    def beside(self, parts: Sequence[Weight]) -> Weight:
        """`[chunks·embed_chunks, rows/embed_chunks, cols]`; scales `[chunks, cols]`."""
        values = [_values(part) for part in parts]
        chunks = jnp.concatenate([_column_chunks(value, self.mesh.size) for value in values], axis=-1)
        count, rows, cols = chunks.shape
        matrix = chunks.reshape(count * self.embed_chunks, rows // self.embed_chunks, cols)
        if not isinstance(parts[0], Int8Weight):
            return matrix
        return Int8Weight(matrix, self.vectors([part.scale for part in parts]))

    def keys_values(self, parts: Sequence[Weight]) -> Weight:
        """`[rows, all cols]`: rows are split over the chips as they stand."""
        return _join(parts, axis=-1)

    def below(self, parts: Sequence[Weight]) -> Weight:
        """`[chunks·embed_chunks, rows, cols/embed_chunks]`; the scale of its output `[cols]`."""
        values = [_values(part).reshape(self.mesh.size, -1, part.shape[-1]) for part in parts]
        chunks = jnp.concatenate(values, axis=1)  # [chunks, rows, embed]
        count, rows, cols = chunks.shape
        split = chunks.reshape(count, rows, self.embed_chunks, cols // self.embed_chunks)
        matrix = split.transpose(0, 2, 1, 3).reshape(count * self.embed_chunks, rows, -1)
        return Int8Weight(matrix, parts[0].scale) if isinstance(parts[0], Int8Weight) else matrix

    def vectors(self, parts: Sequence[jax.Array]) -> jax.Array:
        """`[chunks, cols of a chunk]`."""
        return jnp.concatenate([part.reshape(self.mesh.size, -1) for part in parts], axis=1)

    def pad_vocab(self, table: jax.Array) -> jax.Array:
        """To a multiple of the chips."""
        missing = -table.shape[0] % self.mesh.size
        return jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))


# Which dim of a leaf counts heads, and whether it counts kv heads.
_HEAD_DIMS = {
    "q": (1, False), "k": (1, True), "v": (1, True), "o": (0, False),
    "q_bias": (0, False), "k_bias": (0, True), "v_bias": (0, True),
    "q_norm_gain": (0, False), "k_norm_gain": (0, True),
}  # fmt: skip


def _arrange(leaf: Any, heads: PaddedHeads, axis: int, kv: bool) -> Any:
    if isinstance(leaf, QuantizedTensor):
        scale_axis = axis - (len(leaf.qvalue.shape) - len(leaf.scale.shape))
        scale = leaf.scale if scale_axis < 0 else _arrange(leaf.scale, heads, scale_axis, kv)
        return QuantizedTensor(_arrange(leaf.qvalue, heads, axis, kv), scale)
    order = np.array(heads.kv_order if kv else heads.order)
    if np.array_equal(order, np.arange(leaf.shape[axis])):
        return leaf  # a gather, even of every head in its place, would have each chip hold them all
    present = (order >= 0).reshape([-1 if dim == axis else 1 for dim in range(leaf.ndim)])
    taken = jnp.take(leaf, np.maximum(order, 0), axis=axis)
    return jnp.where(present, taken, jnp.zeros_like(taken))


def _values(weight: Weight) -> jax.Array:
    return weight.qvalue if isinstance(weight, Int8Weight) else weight


def _column_chunks(matrix: jax.Array, count: int) -> jax.Array:
    """[rows, cols] → [count, rows, cols/count]."""
    return matrix.reshape(matrix.shape[0], count, -1).transpose(1, 0, 2)


def _join(parts: Sequence[Weight], axis: int) -> Weight:
    matrix = jnp.concatenate([_values(part) for part in parts], axis=axis)
    if not isinstance(parts[0], Int8Weight):
        return matrix
    scales = [part.scale for part in parts]
    return Int8Weight(matrix, jnp.concatenate(scales) if axis == -1 else scales[0])


def _output_major(weight: Weight) -> Weight:
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.qvalue.T, weight.scale)
    return weight.T
