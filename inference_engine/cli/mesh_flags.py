"""The flags that say which mesh a model runs on and how it lies there; no jax.

Without --mesh a model runs on one device, and the other flags of the group are refused: they would change
nothing.

Data flow: flags → `mesh_options` → `MeshOptions` → `runtime.start_jax` (devices), `model.open_model`.

Worked example: `--mesh 4,2,1 --layout 1d` is MeshShape(4, 2, 1), on a CPU of 8 host devices, with prefill and
decoding in 1D and the defaults of `LayoutRequest` beside.
"""

import dataclasses
import math

from inference_engine.cli.options import Flags, Group, Kind, Option
from inference_engine.layout_choice import LayoutRequest, Layouts
from layers.collectives.mode import REDUCE_DTYPES, CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh_shape import MeshShape

MESH = "mesh"
CUBE = "2,2,2"
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """A mesh and how the model is to lie on it."""

    shape: MeshShape
    layouts: LayoutRequest


def mesh_words(shape: MeshShape, layouts: Layouts) -> str:
    """One phrase for the last line of a run."""
    decode, prefill = layouts.decode, layouts.prefill
    before = "" if prefill.layout is decode.layout else f"{prefill.layout.value} → "
    parts = (
        f"mesh {shape}",
        f"layout {before}{decode.layout.value}",
        f"all-to-all {decode.attn_all_to_all.value}",
        *_context_words(layouts),
        decode.collectives.mode.value,
    )
    return ", ".join(parts)


def _context_words(layouts: Layouts) -> tuple[str, ...]:
    """How positions are dealt, if they are."""
    dealt = ["".join(step.attention.context) or "none" for step in (layouts.prefill, layouts.decode)]
    return (f"context {' → '.join(dict.fromkeys(dealt))}",) if set(dealt) != {"none"} else ()


def mesh_group(default_mesh: str = "", *, every_value: bool = False) -> Group:
    """The flags. `every_value`: where one is not given, all of its values take part, as in `check`."""
    defaults = ShardingConfig()
    unset = "every one" if every_value else ""
    layouts = tuple(value.value for value in Layout) + (() if every_value else (AUTO,))
    contexts = tuple(value.value for value in ContextSplit)
    return Group(
        "Mesh",
        (
            Option(MESH, "chips along x, y and z; a CPU shows as many host devices", metavar="X,Y,Z",
                   shown_default=default_mesh or "one device, no mesh"),
            Option("layout", "where weights and activations lie, in prefill and in decoding", Kind.CHOICE,
                   choices=layouts, metavar="LAYOUT", allowed=", ".join(layouts),
                   shown_default=unset or defaults.layout.value),
            Option("prefill_layout", "that of prefill alone, over the same copy of the weights",
                   Kind.CHOICE, choices=layouts, metavar="LAYOUT", shown_default=unset or "--layout"),
            Option("decode_layout", "that of decoding alone", Kind.CHOICE, choices=layouts, metavar="LAYOUT",
                   shown_default=unset or "--layout"),
            Option("attn_all_to_all", "mesh axes that attention splits the batch over", Kind.CHOICE,
                   choices=tuple(value.value for value in AttnAllToAll),
                   shown_default=unset or defaults.attn_all_to_all.value),
            Option("context_parallel",
                   "mesh axes that deal a text's positions: prompts by ring attention, and the KV cache",
                   Kind.CHOICE, choices=contexts, metavar="AXES", allowed=", ".join(contexts),
                   shown_default=unset or ContextSplit.NONE.value),
            Option("decode_context_parallel", "those of decoding and its KV cache alone", Kind.CHOICE,
                   choices=contexts, metavar="AXES", allowed=", ".join(contexts),
                   shown_default=unset or "--context_parallel"),
            Option("collectives", "form of the collective matmuls", Kind.CHOICE,
                   choices=tuple(value.value for value in CollectiveMode),
                   shown_default=unset or defaults.collectives.mode.value),
            Option("reduce_dtype", "dtype of the partial sums that travel", Kind.CHOICE,
                   choices=REDUCE_DTYPES,
                   shown_default=unset or defaults.collectives.reduce_dtype),
        ),
    )  # fmt: skip


def mesh_options(flags: Flags) -> MeshOptions | None:
    """What the flags of `mesh_group` ask for; None for one device.

    Raises UserError: a mesh that is none, or a flag of the group without a mesh.
    """
    if flags[MESH] is None:
        typed = [option.name for option in mesh_group().options if option.name in flags.given]
        if typed:
            raise UserError(
                f"--{typed[0]} says how a model lies on a mesh, and there is none; "
                f"nearest: --mesh {CUBE} --{typed[0]} {flags[typed[0]]}"
            )
        return None
    defaults = ShardingConfig()
    collectives = CollectiveConfig(
        CollectiveMode(flags["collectives"] or defaults.collectives.mode),
        flags["reduce_dtype"] or defaults.collectives.reduce_dtype,
    )
    request = LayoutRequest(
        _layout(flags["prefill_layout"] or flags["layout"]),
        _layout(flags["decode_layout"] or flags["layout"]),
        AttnAllToAll(flags["attn_all_to_all"] or defaults.attn_all_to_all),
        collectives,
        ContextSplit(flags["context_parallel"] or ContextSplit.NONE),
        ContextSplit(flags["decode_context_parallel"] or flags["context_parallel"] or ContextSplit.NONE),
    )
    return MeshOptions(MeshShape.parse(flags[MESH]), request)


def decoding_mesh_options(flags: Flags) -> MeshOptions | None:
    """The same where tokens are decoded too; raises UserError for one layout that only prefill can have."""
    mesh = mesh_options(flags)
    decode = None if mesh is None else mesh.layouts.decode
    if mesh is not None and decode is not None and mesh.shape.over(decode.form.time) > 1:
        flag = "decode_layout" if flags["decode_layout"] else "layout"
        raise UserError(
            f"--{flag}={decode.value} splits a prompt's tokens over chips, and a decode step has one token a "
            f"row; nearest: --prefill_layout {decode.value}"
        )
    return mesh


def chunk_multiple(mesh: MeshOptions | None) -> int:
    """What prefill chunks must be multiples of, for the prefill layout asked for to split their time."""
    if mesh is None:
        return 1
    context = mesh.shape.over(mesh.layouts.prefill_context.axes)
    if mesh.layouts.prefill is None:
        return context
    return math.lcm(context, mesh.shape.over(mesh.layouts.prefill.form.time))


def _layout(text: str | None) -> Layout | None:
    """The layout, the default for nothing, None for `auto`."""
    return None if text == AUTO else Layout(text or ShardingConfig().layout)
