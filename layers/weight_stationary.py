"""The weight-stationary layouts: how a layer's projections meet the mesh.

Weights never move. What moves is the activations, joined to the matmuls (`layers.collectives`):

  2D  residual [batch, time, embed.XYZ]
      gather       all-gather over y, z             → [batch, time, embed.X]
      project_in   matmul → reduce-scatter over x   → [batch, time, columns.YZX]
      project_out  all-gather → matmul over x       → [batch, time, embed.X] {y, z unreduced}
                   reduce-scatter over y, then z    → [batch, time, embed.XYZ]
      With the residual [batch.Z, time, embed.XY] or [batch, time.Z, embed.XY], z gathers and scatters batch
      or time in place of embed; nothing else changes, and neither does what travels.
  1D  residual [batch, time, embed.X]
      gather       nothing
      project_in   all-gather → matmul over x       → [batch, time, columns.YZX]
      project_out  matmul → reduce-scatter over x   → [batch, time, embed.X] {y, z unreduced}
                   sum over y, z                    → [batch, time, embed.X]

In all, columns come out in (y, z, x) order and a chip's weight is `[X, rows, cols]`.

Worked example: embed 240 on 2,2,2 in 2D: x [b, t, 30] → [b, t, 120] → q | W0 | W1 columns of this chip.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig
from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.collectives.ring import Index
from layers.layout import LayoutForm
from layers.sharded_ops import local_part


def _own_kv_columns(n: jax.Array, matrix: jax.Array) -> jax.Array:
    """n [batch, time, embed.X] → this chip's slice of embed times its rows, {x, y, z unreduced}."""
    mine = local_part(n, ("y", "z"), 2)  # [batch, time, embed.XYZ]
    return jnp.einsum("bte,ec->btc", mine, matrix.astype(n.dtype), preferred_element_type=jnp.float32)


def _only_chunk(parts: Sequence[jax.Array]) -> jax.Array:
    """Parts [1, batch, time, rows] side by side."""
    return jnp.concatenate([part[0] for part in parts], axis=-1) if len(parts) > 1 else parts[0][0]


@dataclasses.dataclass(frozen=True)
class WeightStationary2D:
    """See the module's docstring."""

    form: LayoutForm
    config: CollectiveConfig
    embed_axes = ("x",)

    @property
    def _dims(self) -> dict[str, int]:
        """The residual's dim that y and z split."""
        return {"y": 2, "z": 0 if self.form.batch else 1 if self.form.time else 2}

    @jax.named_scope("residual")
    def gather(self, x: jax.Array) -> jax.Array:
        """The residual → [batch, time, embed.X]."""
        if self._dims["z"] == 2:
            return lax.all_gather(x, ("y", "z"), axis=2, tiled=True)
        rows = lax.all_gather(x, "z", axis=self._dims["z"], tiled=True)
        return lax.all_gather(rows, "y", axis=2, tiled=True)

    def to_embed_x(self, x: jax.Array) -> jax.Array:
        """The residual → [batch, time, embed.X]."""
        return self.gather(x)

    def project_in(
        self, n: jax.Array, matrix: jax.Array, layer: Index | None, finish: Callable[[jax.Array, Index], Any]
    ) -> Any:
        """Multiplies by columns.YZ and reduce-scatters them over x."""
        return finish(matmul_reducescatter(n, matrix, "x", self.config, layer=layer)[None], 0)

    def project_out(self, h: Sequence[jax.Array], matrix: jax.Array, layer: Index | None) -> jax.Array:
        """Gathers rows over x while multiplying, then reduce-scatters over y and z."""
        total = allgather_matmul(_only_chunk(h), matrix, "x", self.config, layer=layer)
        for axis, dimension in self._dims.items():
            total = reduce_scatter(total, axis, self.config.reduce_dtype, dimension=dimension)
        return total

    def project_kv(self, n: jax.Array, matrix: jax.Array) -> jax.Array:
        """float32 columns {x, y, z unreduced}."""
        return _own_kv_columns(n, matrix)

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """Exact in any dtype: one chip of y and z has the row, the others have zeros."""
        for axis, dimension in self._dims.items():
            rows = lax.psum_scatter(rows, axis, scatter_dimension=dimension, tiled=True)
        return rows


@dataclasses.dataclass(frozen=True)
class WeightStationary1D:
    """See the module's docstring."""

    form: LayoutForm
    config: CollectiveConfig
    embed_axes = ("x",)

    @jax.named_scope("residual")
    def gather(self, x: jax.Array) -> jax.Array:
        """Nothing to do."""
        return x

    def to_embed_x(self, x: jax.Array) -> jax.Array:
        """Nothing to do."""
        return x

    def project_in(
        self, n: jax.Array, matrix: jax.Array, layer: Index | None, finish: Callable[[jax.Array, Index], Any]
    ) -> Any:
        """Gathers embed over x while multiplying."""
        return finish(allgather_matmul(n, matrix, "x", self.config, layer=layer)[None], 0)

    def project_out(self, h: Sequence[jax.Array], matrix: jax.Array, layer: Index | None) -> jax.Array:
        """Multiplies, reduce-scatters embed over x, then sums over y and z."""
        partial = matmul_reducescatter(_only_chunk(h), matrix, "x", self.config, layer=layer)
        return all_reduce(partial, ("y", "z"), self.config.reduce_dtype)

    def project_kv(self, n: jax.Array, matrix: jax.Array) -> jax.Array:
        """float32 columns {x, y, z unreduced}."""
        return _own_kv_columns(n, matrix)

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """Exact in any dtype: one chip of y and z has the row, the others have zeros."""
        return lax.psum(rows, ("y", "z"))
