"""What a layer asks of its layout: the same few verbs for all of them, so that one layer serves every layout.

Columns (of q, W0, W1) and rows (of Wo) come in chunks, one a chip of the mesh, in (y, z, x) order. A
weight-stationary layout works on one chunk a chip, a weight-gathered one on all chunks along the gathered
axes; arrays of columns are therefore `[chunks, batch, time, width]` in both.

Data flow of a layer: gather → (norm) → project_in, project_kv → (attention, activation) → project_out.

Worked example: 2D on 2,2,2: x [b, t, 30] → gather [b, t, 120] → project_in [1, b, t, 272].
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from layers.collectives.mode import CollectiveConfig
from layers.collectives.ring import Index
from layers.layout import LayoutForm, ShardingConfig, WeightStorage
from layers.weight_gathered import WeightGathered
from layers.weight_stationary import WeightStationary1D, WeightStationary2D

Finish = Callable[[jax.Array, Index], Any]
"""(float32 products [chunks, batch, time, cols] of one group of chunks, the group) → leaves [chunks, …]."""


@runtime_checkable
class LayoutOps(Protocol):
    """A layout's projections; all arrays are this chip's."""

    @property
    def form(self) -> LayoutForm:
        """The layout in mesh axes."""

    @property
    def config(self) -> CollectiveConfig:
        """Form and reduce dtype of the collective matmuls."""

    @property
    def embed_axes(self) -> tuple[str, ...]:
        """Axes that split embed after `gather`."""

    def gather(self, x: jax.Array) -> jax.Array:
        """The residual as the projections read it, [batch, time, embed over `embed_axes`]."""

    def to_embed_x(self, x: jax.Array) -> jax.Array:
        """The residual as [batch, time, embed.X], batch and time whole: what the logits read."""

    def project_in(self, n: jax.Array, matrix: jax.Array, layer: Index | None, finish: Finish) -> Any:
        """n times the columns of this chip's chunks, each group of them through `finish` at once."""

    def project_out(self, h: Sequence[jax.Array], matrix: jax.Array, layer: Index | None) -> jax.Array:
        """Rows in parts, side by side in a chunk, [chunks, batch, time, rows] each → float32 residual."""

    def project_kv(self, n: jax.Array, matrix: jax.Array) -> jax.Array:
        """n → float32 columns of k and v, unreduced over the axes that split heads or trade them."""

    def reduce_embedding(self, rows: jax.Array) -> jax.Array:
        """[batch, time, embed.X] {y, z unreduced} → the residual's sharding, in the same dtype."""


def layout_ops(sharding: ShardingConfig) -> LayoutOps:
    """The projections of a step's layout."""
    form = sharding.layout.form
    if form.gathered:
        return WeightGathered(form, sharding.collectives)
    return _STATIONARY[form.storage](form, sharding.collectives)


_STATIONARY: dict[WeightStorage, Callable[[LayoutForm, CollectiveConfig], LayoutOps]] = {
    WeightStorage.ONE_D: WeightStationary1D,
    WeightStorage.TWO_D: WeightStationary2D,
}
