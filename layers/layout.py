"""Which layout runs on the mesh, as data; no jax, so that planners and the command line can read it.

`Layout` says where weights and the residual live, `AttnAllToAll` how attention re-shards the batch,
`ContextSplit` whether a text's positions are dealt over chips, and `ShardingConfig` holds them with the form
of the collective matmuls. Every choice carries its mesh axes, so that the layers are one straight path and no
ladder of cases. What cannot run is refused here and nowhere else: `ShardingConfig` knows one step's rules,
`check_pair` those of prefill and decode over one copy of the weights.

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


class AxesSetting(enum.Enum):
    """A choice of mesh axes, whose value is their letters, or `none`."""

    @property
    def axes(self) -> Axes:
        """The axes, major first."""
        return () if self.value == "none" else tuple(self.value)


class AttnAllToAll(AxesSetting):
    """Mesh axes over which attention splits the batch instead of the heads."""

    NONE = "none"
    AXIS_Z = "z"
    AXES_YZ = "yz"
    AXES_YZX = "yzx"


class ContextSplit(AxesSetting):
    """Mesh axes over which attention and the KV cache split a text's positions instead of the heads."""

    NONE = "none"
    X = "x"
    Y = "y"
    Z = "z"
    XY = "xy"
    XZ = "xz"
    YZ = "yz"
    XYZ = "xyz"


@dataclasses.dataclass(frozen=True)
class AttentionAxes:
    """How attention splits rows, heads and positions; the axes of each, major first.

    Attributes:
      rows: that split the batch before any trade.
      traded: over which an all-to-all trades heads for more rows.
      held: whose heads a chip has all of from the start, in the order of the weights' chunks.
      context: over which the positions of keys and of the cache are dealt; see `striped_cache`.
      ring: whether queries are dealt as keys are, so that keys come to them on a ring. Otherwise every chip
        has all queries, and what each finds among its own keys is joined.
    """

    rows: Axes = ()
    traded: Axes = ()
    held: Axes = ()
    context: Axes = ()
    ring: bool = False

    @property
    def batch(self) -> Axes:
        """Axes of the batch in attention and in the KV cache."""
        return self.rows + self.traded

    @property
    def time(self) -> Axes:
        """Axes that split the queries' time."""
        return self.context if self.ring else ()

    @property
    def joined(self) -> Axes:
        """Axes of the context over which a chip has yet to get all heads."""
        return tuple(axis for axis in self.context if axis not in self.held)

    @property
    def cache(self) -> tuple[Axes, Axes, Axes]:
        """Axes of the cache's rows, heads and positions."""
        return self.batch, self.heads, self.context

    @property
    def whole_rows(self) -> "AttentionAxes":
        """The same heads, with every row on every chip that holds them: how shared prefixes lie."""
        return AttentionAxes(held=self.traded + self.held, context=self.context)

    @property
    def heads(self) -> Axes:
        """Axes of the heads in attention: logical heads are split over x, then y, then z."""
        return tuple(axis for axis in AXES if axis not in self.traded + self.held + self.context)


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """One step's layout; prefill and decode may have different ones over one copy of the weights.

    Attributes:
      context: over which axes positions are dealt. A gathered layout that splits time deals them over its
        own axes in any case.
      ring: whether a step's queries are dealt as well: in prefill.

    Raises UserError for an all-to-all over axes along which the layout splits no heads, and for a context
    over axes that the layout or the all-to-all uses otherwise.
    """

    layout: Layout = Layout.WEIGHT_STATIONARY_2D
    attn_all_to_all: AttnAllToAll = AttnAllToAll.NONE
    collectives: CollectiveConfig = CollectiveConfig()
    context: ContextSplit = ContextSplit.NONE
    ring: bool = False

    def __post_init__(self) -> None:
        form = self.layout.form
        trades = _Choice("attn_all_to_all", self.attn_all_to_all)
        trades.refuse_axes(form.gathered, f"trades heads that layout {self.layout.value} does not split over")
        flag = "context_parallel" if self.ring else "decode_context_parallel"
        context = _Choice(flag, self.context)
        rows, time = form.stays_split
        context.refuse_axes(rows, f"deals positions where layout {self.layout.value} splits the batch over")
        if time:
            context.refuse_all_but(time, f"is not how layout {self.layout.value} splits time, over")
        dealt = self.context.axes
        trades.refuse_axes(dealt, f"trades heads where {flag}={self.context.value} deals over")

    @property
    def attention(self) -> AttentionAxes:
        """How attention is split."""
        form = self.layout.form
        rows, time = form.stays_split
        context = time or self.context.axes
        ring = bool(time) or (self.ring and bool(context))
        return AttentionAxes(rows, self.attn_all_to_all.axes, form.held, context, ring)

    def for_prefill(self, layout: Layout, context: ContextSplit = ContextSplit.NONE) -> "ShardingConfig":
        """Prefill beside this decoding: its own layout and context.

        It trades over those axes of this all-to-all that it neither gathers nor deals positions over.
        """
        taken = layout.form.gathered + context.axes
        wanted = tuple(axis for axis in self.attn_all_to_all.axes if axis not in taken)
        trade = max((t for t in AttnAllToAll if set(t.axes) <= set(wanted)), key=lambda t: len(t.axes))
        return ShardingConfig(layout, trade, self.collectives, context, ring=True)

    def padded_rows(self, rows: int, mesh: MeshShape) -> int:
        """Rows of a batch as the residual holds them, over all chips."""
        form, attention = self.layout.form, self.attention
        return _round_up(rows, mesh.over(form.batch) * (mesh.over(attention.traded) if attention.rows else 1))

    def cache_rows(self, rows: int, mesh: MeshShape) -> int:
        """Rows of a batch as attention and the cache hold them, over all chips."""
        return _round_up(self.padded_rows(rows, mesh), mesh.over(self.attention.batch))

    def cache_positions(self, time: int, mesh: MeshShape) -> int:
        """Positions of a row as the cache holds them, over all chips."""
        return _round_up(time, mesh.over(self.attention.context))

    def time_shards(self, mesh: MeshShape) -> int:
        """Parts that the residual or attention splits time into; a step's tokens must divide by it."""
        return math.lcm(mesh.over(self.layout.form.time), mesh.over(self.attention.time))


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A setting under its flag's name, and how it is refused."""

    name: str
    chosen: AxesSetting

    def refuse_axes(self, axes: Axes, why: str) -> None:
        """Refuses a setting with one of these axes; `why` is followed by their names."""
        if set(self.chosen.axes) & set(axes):
            legal = [setting for setting in type(self.chosen) if not set(setting.axes) & set(axes)]
            self._refuse(axes, why, legal)

    def refuse_all_but(self, axes: Axes, why: str) -> None:
        """Refuses a setting of other axes than none or these."""
        if self.chosen.axes not in ((), axes):
            self._refuse(axes, why, [s for s in type(self.chosen) if s.axes in ((), axes)])

    def _refuse(self, axes: Axes, why: str, legal: list[AxesSetting]) -> None:
        nearest = max(legal, key=lambda s: (len(set(s.axes) & set(self.chosen.axes)), -len(s.axes)))
        remedy = f"allowed: {', '.join(setting.value for setting in legal)}; nearest: {nearest.value}"
        if len(legal) == 1:  # `none` alone would read as if nothing were
            remedy = f"nearest: {self.name}={nearest.value}"
        raise UserError(f"{self.name}={self.chosen.value} {why} {', '.join(axes)}; {remedy}")


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def shares_weights(first: Layout, second: Layout, mesh: MeshShape) -> bool:
    """Whether one stored copy of the weights serves both layouts."""
    return first.form.storage is second.form.storage or mesh.x == 1


def check_pair(prefill: ShardingConfig, decode: ShardingConfig, mesh: MeshShape) -> None:
    """Refuses a prefill and a decode layout that cannot run over one copy of the weights.

    Raises UserError with the reason: storages that differ, or time split in a decode step.
    """
    shards = mesh.over(decode.layout.form.time)
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
            f"{prefill.layout.value}{_with_context(prefill)} splits time on mesh {mesh}; allowed: multiples "
            f"of {shards}; nearest: {nearest}"
        )


def _with_context(sharding: ShardingConfig) -> str:
    """How positions are dealt, where that was asked for."""
    if sharding.context is ContextSplit.NONE:
        return ""
    return f" with context_parallel={sharding.context.value}"


def _without_time(layout: Layout) -> Layout:
    """The layout that splits the batch where this one splits time."""
    form = dataclasses.replace(layout.form, batch=layout.form.time, time=())
    return next(other for other in Layout if other.form == form)
