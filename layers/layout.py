"""Which layout runs on the mesh, as data; no jax, so that planners and the command line can read it.

`Layout` says where weights and the residual live, `AttnAllToAll` how attention re-shards the batch, and
`ShardingConfig` holds both with the form of the collective matmuls. Every choice carries its mesh axes, so
that the layers are one straight path and no ladder of cases.

Worked example: on a mesh 2,2,2 AXES_YZ leaves each chip a quarter of the batch (axes y, z) and half of the
heads (axis x).
"""

import dataclasses
import enum

from layers.collectives.mode import CollectiveConfig
from layers.mesh_shape import AXES, MeshShape

CHUNK_AXES = ("y", "z", "x")
"""Axes of the weights' chunks, of projected columns and of the logits' vocabulary, major first."""


class Layout(enum.Enum):
    """Where weights and activations are, beside the batch.

    WEIGHT_STATIONARY_1D: columns of q, W0, W1 and rows of Wo split over all chips, embed whole; the residual
      is [batch, time, embed.X].
    WEIGHT_STATIONARY_2D: those split over y and z, embed over x; the residual is [batch, time, embed.XYZ].
    """

    WEIGHT_STATIONARY_1D = "1d"
    WEIGHT_STATIONARY_2D = "2d"

    @property
    def residual_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the residual's embed dim is split, major first."""
        return AXES if self is Layout.WEIGHT_STATIONARY_2D else ("x",)


class AttnAllToAll(enum.Enum):
    """Mesh axes over which attention splits the batch instead of the heads."""

    NONE = "none"
    AXIS_Z = "z"
    AXES_YZ = "yz"
    AXES_YZX = "yzx"

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes of the batch in attention and in the KV cache, major first."""
        return tuple(self.value) if self is not AttnAllToAll.NONE else ()

    @property
    def head_axes(self) -> tuple[str, ...]:
        """Axes of the heads in attention, major first: logical heads are split over x, then y, then z."""
        return tuple(axis for axis in AXES if axis not in self.batch_axes)


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """One step's layout; prefill and decode may have different ones over one copy of the weights."""

    layout: Layout = Layout.WEIGHT_STATIONARY_2D
    attn_all_to_all: AttnAllToAll = AttnAllToAll.NONE
    collectives: CollectiveConfig = CollectiveConfig()

    def batch_shards(self, mesh: MeshShape) -> int:
        """Parts that attention splits the batch into."""
        return mesh.over(self.attn_all_to_all.batch_axes)

    def head_shards(self, mesh: MeshShape) -> int:
        """Parts that attention splits the heads into."""
        return mesh.over(self.attn_all_to_all.head_axes)
