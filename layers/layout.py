"""Which layout runs on the mesh, as data; no jax, so that planners and the command line can read it.

`Layout` says where weights and the residual live, `AttnAllToAll` how attention re-shards the batch, and
`ShardingConfig` holds both with the form of the collective matmuls. Every choice carries its mesh axes, so
that the layers are one straight path and no ladder of cases. What cannot run is refused here and nowhere
else: `ShardingConfig` knows one step's rules, `check_pair` those of prefill and decode over one copy of the
weights.

Worked example: on a mesh 2,2,2 AXES_YZ leaves each chip a quarter of the batch (axes y, z) and half of the
heads (axis x). GATHERED_XY leaves it a quarter of the batch (x, y) and half of the heads (z).
"""

import dataclasses
import enum
import math

from layers.collectives.mode import CollectiveConfig
from layers.errors import UserError
from layers.mesh_shape import AXES, MeshShape

Axes = tuple[str, ...]

CHUNK_AXES = ("y", "z", "x")
"""Axes of the weights' chunks, of projected columns and of the logits' vocabulary, major first."""


class WeightStorage(enum.Enum):
    """How the matrices of a layer are cut and placed; one copy serves every layout of its storage.

    ONE_D: columns of q, W0, W1 and rows of Wo over all chips, embed whole.
    TWO_D: those over y and z, embed over x.
    With x = 1 the two are the same.
    """

    ONE_D = "1d"
    TWO_D = "2d"


@dataclasses.dataclass(frozen=True)
class LayoutForm:
    """What a layout is, in mesh axes, major first.

    Attributes:
      storage: how its weights lie.
      gathered: axes over which weights are gathered when used; a first part of AXES.
      batch, time, embed: axes that split the residual's dims.
    """

    storage: WeightStorage
    gathered: Axes = ()
    batch: Axes = ()
    time: Axes = ()
    embed: Axes = AXES

    @property
    def held(self) -> Axes:
        """Axes whose chunks of columns and heads a chip computes all of, in the order of the chunks."""
        return tuple(axis for axis in CHUNK_AXES if axis in self.gathered)

    @property
    def stays_split(self) -> "tuple[Axes, Axes]":
        """Batch and time axes that the projections leave split: those of a gathered layout."""
        return (self.batch, self.time) if self.gathered else ((), ())


class Layout(enum.Enum):
    """Where weights and activations are, beside attention; the residual's sharding in brackets.

    WEIGHT_STATIONARY_1D: weights stay, split over all chips by column; [batch, time, embed.X].
    WEIGHT_STATIONARY_2D: weights stay, split by column and row; [batch, time, embed.XYZ].
    WEIGHT_STATIONARY_2D_BATCH_Z: the same; [batch.Z, time, embed.XY].
    WEIGHT_STATIONARY_2D_TIME_Z: the same, for one long prompt; [batch, time.Z, embed.XY].
    WEIGHT_GATHERED_X, _XY, _XYZ: weights stored as in 2D and gathered over the named axes when used;
      [batch over those axes, time, embed over the rest].
    WEIGHT_GATHERED_X_TIME, …: the same with time in place of batch, for one long prompt.
    """

    WEIGHT_STATIONARY_1D = "1d"
    WEIGHT_STATIONARY_2D = "2d"
    WEIGHT_STATIONARY_2D_BATCH_Z = "2d_batch_z"
    WEIGHT_STATIONARY_2D_TIME_Z = "2d_time_z"
    WEIGHT_GATHERED_X = "gathered_x"
    WEIGHT_GATHERED_XY = "gathered_xy"
    WEIGHT_GATHERED_XYZ = "gathered_xyz"
    WEIGHT_GATHERED_X_TIME = "gathered_x_time"
    WEIGHT_GATHERED_XY_TIME = "gathered_xy_time"
    WEIGHT_GATHERED_XYZ_TIME = "gathered_xyz_time"

    @property
    def form(self) -> LayoutForm:
        """The layout in mesh axes."""
        return _FORMS[self]


def _gathered(axes: Axes, *, time: bool = False) -> LayoutForm:
    rest = tuple(axis for axis in AXES if axis not in axes)
    batch_axes, time_axes = ((), axes) if time else (axes, ())
    return LayoutForm(WeightStorage.TWO_D, axes, batch_axes, time_axes, rest)


_FORMS = {
    Layout.WEIGHT_STATIONARY_1D: LayoutForm(WeightStorage.ONE_D, embed=("x",)),
    Layout.WEIGHT_STATIONARY_2D: LayoutForm(WeightStorage.TWO_D),
    Layout.WEIGHT_STATIONARY_2D_BATCH_Z: LayoutForm(WeightStorage.TWO_D, batch=("z",), embed=("x", "y")),
    Layout.WEIGHT_STATIONARY_2D_TIME_Z: LayoutForm(WeightStorage.TWO_D, time=("z",), embed=("x", "y")),
    Layout.WEIGHT_GATHERED_X: _gathered(("x",)),
    Layout.WEIGHT_GATHERED_XY: _gathered(("x", "y")),
    Layout.WEIGHT_GATHERED_XYZ: _gathered(AXES),
    Layout.WEIGHT_GATHERED_X_TIME: _gathered(("x",), time=True),
    Layout.WEIGHT_GATHERED_XY_TIME: _gathered(("x", "y"), time=True),
    Layout.WEIGHT_GATHERED_XYZ_TIME: _gathered(AXES, time=True),
}


class AttnAllToAll(enum.Enum):
    """Mesh axes over which attention splits the batch instead of the heads."""

    NONE = "none"
    AXIS_Z = "z"
    AXES_YZ = "yz"
    AXES_YZX = "yzx"

    @property
    def axes(self) -> Axes:
        """Axes that trade heads for rows of the batch, major first."""
        return tuple(self.value) if self is not AttnAllToAll.NONE else ()


@dataclasses.dataclass(frozen=True)
class AttentionAxes:
    """How attention splits rows, heads and time; the axes of each, major first.

    Attributes:
      rows: that split the batch before any trade.
      traded: over which an all-to-all trades heads for more rows.
      held: whose heads a chip has all of from the start, in the order of the weights' chunks.
      time: that split the queries' time; keys and values are gathered over them.
    """

    rows: Axes = ()
    traded: Axes = ()
    held: Axes = ()
    time: Axes = ()

    @property
    def batch(self) -> Axes:
        """Axes of the batch in attention and in the KV cache."""
        return self.rows + self.traded

    @property
    def whole_rows(self) -> "AttentionAxes":
        """The same heads, with every row on every chip that holds them: how shared prefixes lie."""
        return AttentionAxes(held=self.traded + self.held)

    @property
    def heads(self) -> Axes:
        """Axes of the heads in attention: logical heads are split over x, then y, then z."""
        return tuple(axis for axis in AXES if axis not in self.traded + self.held)


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """One step's layout; prefill and decode may have different ones over one copy of the weights.

    Raises UserError for an all-to-all over an axis along which a gathered layout splits no heads.
    """

    layout: Layout = Layout.WEIGHT_STATIONARY_2D
    attn_all_to_all: AttnAllToAll = AttnAllToAll.NONE
    collectives: CollectiveConfig = CollectiveConfig()

    def __post_init__(self) -> None:
        gathered = self.layout.form.gathered
        if set(self.attn_all_to_all.axes) & set(gathered):
            legal = [setting.value for setting in AttnAllToAll if not set(setting.axes) & set(gathered)]
            raise UserError(
                f"attn_all_to_all={self.attn_all_to_all.value} trades heads that layout "
                f"{self.layout.value} does not split over {', '.join(gathered)}; "
                f"allowed: {', '.join(legal)}; nearest: {legal[-1]}"
            )

    @property
    def attention(self) -> AttentionAxes:
        """How attention is split."""
        form = self.layout.form
        rows, time = form.stays_split
        return AttentionAxes(rows, self.attn_all_to_all.axes, form.held, time)

    def for_prefill(self, layout: Layout) -> "ShardingConfig":
        """Prefill beside this decoding: its own layout, trading over those axes that it does not gather."""
        gathered = layout.form.gathered
        wanted = tuple(axis for axis in self.attn_all_to_all.axes if axis not in gathered)
        trade = max((t for t in AttnAllToAll if set(t.axes) <= set(wanted)), key=lambda t: len(t.axes))
        return ShardingConfig(layout, trade, self.collectives)

    def padded_rows(self, rows: int, mesh: MeshShape) -> int:
        """Rows of a batch as the residual holds them, over all chips."""
        form, attention = self.layout.form, self.attention
        return _round_up(rows, mesh.over(form.batch) * (mesh.over(attention.traded) if attention.rows else 1))

    def cache_rows(self, rows: int, mesh: MeshShape) -> int:
        """Rows of a batch as attention and the cache hold them, over all chips."""
        return _round_up(self.padded_rows(rows, mesh), mesh.over(self.attention.batch))

    def time_shards(self, mesh: MeshShape) -> int:
        """Parts that the residual splits time into; a step's tokens must divide by it."""
        return mesh.over(self.layout.form.time)


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def shares_weights(first: Layout, second: Layout, mesh: MeshShape) -> bool:
    """Whether one stored copy of the weights serves both layouts."""
    return first.form.storage is second.form.storage or mesh.x == 1


def check_pair(prefill: ShardingConfig, decode: ShardingConfig, mesh: MeshShape) -> None:
    """Refuses a prefill and a decode layout that cannot run over one copy of the weights.

    Raises UserError with the reason: storages that differ, or time split in a decode step.
    """
    shards = decode.time_shards(mesh)
    if shards > 1:
        legal = [layout.value for layout in Layout if mesh.over(layout.form.time) == 1]
        raise UserError(
            f"decode layout {decode.layout.value} splits time over {shards} chips, and a decode step has one "
            f"token a row; allowed: {', '.join(legal)}; nearest: {_without_time(decode.layout).value}"
        )
    if not shares_weights(prefill.layout, decode.layout, mesh):
        legal = [layout.value for layout in Layout if shares_weights(layout, decode.layout, mesh)]
        raise UserError(
            f"prefill layout {prefill.layout.value} stores weights in another order than decode layout "
            f"{decode.layout.value}, and there is one copy of them on mesh {mesh}; allowed for prefill: "
            f"{', '.join(legal)}; nearest: {legal[0]}"
        )


def check_chunk(prefill: ShardingConfig, chunk: int, mesh: MeshShape) -> None:
    """Refuses a prefill chunk that the layout cannot split over time; raises UserError."""
    shards = prefill.time_shards(mesh)
    if chunk % shards:
        nearest = max(shards, round(chunk / shards) * shards)
        raise UserError(
            f"a prefill chunk of {chunk} tokens does not divide over the {shards} parts into which layout "
            f"{prefill.layout.value} splits time on mesh {mesh}; allowed: multiples of {shards}; "
            f"nearest: {nearest}"
        )


def _without_time(layout: Layout) -> Layout:
    """The layout that splits the batch where this one splits time."""
    form = dataclasses.replace(layout.form, batch=layout.form.time, time=())
    return next(other for other in Layout if other.form == form)
