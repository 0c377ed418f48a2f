"""The two weight-stationary layouts: how a layer's projections meet the mesh.

Weights never move. What moves is the activations, joined to the matmuls (`layers.collectives`):

  2D  residual [batch, time, embed.XYZ]
      gather       all-gather over y, z             → [batch, time, embed.X]
      project_in   matmul → reduce-scatter over x   → [batch, time, columns.YZX]
      project_out  all-gather → matmul over x       → [batch, time, embed.X] {y, z unreduced}
                   reduce-scatter over y, then z    → [batch, time, embed.XYZ]
  1D  residual [batch, time, embed.X]
      gather       nothing
      project_in   all-gather → matmul over x       → [batch, time, columns.YZX]
      project_out  matmul → reduce-scatter over x   → [batch, time, embed.X] {y, z unreduced}
                   sum over y, z                    → [batch, time, embed.X]

In both, columns come out in (y, z, x) order and a chip's weight is `[X, rows, cols]`.

Worked example: embed 240 on 2,2,2 in 2D: x [b, t, 30] → [b, t, 120] → q | W0 | W1 columns of this chip.
"""

import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import jax
from jax import lax

from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig
from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.layout import Layout
from layers.mesh_shape import AXES

Index = jax.Array | None


@runtime_checkable
class StationaryOps(Protocol):
    """What a layer asks of its layout; all arrays are this chip's."""

    residual_axes: ClassVar[tuple[str, ...]]

    @property
    def config(self) -> CollectiveConfig:
        """Form and reduce dtype of the collective matmuls."""

    def gather(self, x: jax.Array) -> jax.Array:
        """The residual as [batch, time, embed.X]."""

    def project_in(self, n: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """[batch, time, embed.X] → float32 [batch, time, columns.YZX]."""

    def project_out(self, h: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """[batch, time, rows.YZX] → float32 in the residual's sharding."""

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """[batch, time, embed.X] {y, z unreduced} → the residual's sharding, in the same dtype."""


@dataclasses.dataclass(frozen=True)
class WeightStationary2D:
    """See the module's docstring."""

    config: CollectiveConfig
    residual_axes: ClassVar[tuple[str, ...]] = AXES

    def gather(self, x: jax.Array) -> jax.Array:
        """embed.XYZ → embed.X."""
        return lax.all_gather(x, ("y", "z"), axis=2, tiled=True)

    def project_in(self, n: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """Multiplies by columns.YZ and reduce-scatters them over x."""
        return matmul_reducescatter(n, matrix, "x", self.config, layer=layer)

    def project_out(self, h: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """Gathers rows over x while multiplying, then reduce-scatters embed over y and z."""
        partial = allgather_matmul(h, matrix, "x", self.config, layer=layer)
        return reduce_scatter(partial, ("y", "z"), self.config.reduce_dtype, dimension=2)

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """Exact in any dtype: one chip of y and z has the row, the others have zeros."""
        scattered = lax.psum_scatter(rows, "y", scatter_dimension=2, tiled=True)
        return lax.psum_scatter(scattered, "z", scatter_dimension=2, tiled=True)


@dataclasses.dataclass(frozen=True)
class WeightStationary1D:
    """See the module's docstring."""

    config: CollectiveConfig
    residual_axes: ClassVar[tuple[str, ...]] = ("x",)

    def gather(self, x: jax.Array) -> jax.Array:
        """Nothing to do."""
        return x

    def project_in(self, n: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """Gathers embed over x while multiplying."""
        return allgather_matmul(n, matrix, "x", self.config, layer=layer)

    def project_out(self, h: jax.Array, matrix: jax.Array, layer: Index) -> jax.Array:
        """Multiplies, reduce-scatters embed over x, then sums over y and z."""
        partial = matmul_reducescatter(h, matrix, "x", self.config, layer=layer)
        return all_reduce(partial, ("y", "z"), self.config.reduce_dtype)

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """Exact in any dtype: one chip of y and z has the row, the others have zeros."""
        return lax.psum(rows, ("y", "z"))


OPS: dict[Layout, type[WeightStationary1D | WeightStationary2D]] = {
    Layout.WEIGHT_STATIONARY_1D: WeightStationary1D,
    Layout.WEIGHT_STATIONARY_2D: WeightStationary2D,
}
