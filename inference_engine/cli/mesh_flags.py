"""The flags that say which mesh a model runs on and how it lies there; no jax.

Without --mesh a model runs on one device, and the other flags of the group are refused: they would change
nothing.

Data flow: flags → `mesh_options` → `MeshOptions` → `runtime.start_jax` (devices), `model.open_model`.

Worked example: `--mesh 4,2,1 --layout 1d` is MeshShape(4, 2, 1), on a CPU of 8 host devices, with 1D weights
and the defaults of `ShardingConfig` beside.
"""

import dataclasses

from inference_engine.cli.options import Flags, Group, Kind, Option
from layers.collectives.mode import REDUCE_DTYPES, CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout, ShardingConfig
from layers.mesh_shape import MeshShape

MESH = "mesh"
CUBE = "2,2,2"


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """A mesh and how the model lies on it."""

    shape: MeshShape
    sharding: ShardingConfig

    def words(self) -> str:
        """One phrase for the last line of a run."""
        sharding = self.sharding
        parts = (
            f"mesh {self.shape}",
            f"layout {sharding.layout.value}",
            f"all-to-all {sharding.attn_all_to_all.value}",
            sharding.collectives.mode.value,
        )
        return ", ".join(parts)


def mesh_group(default_mesh: str = "", *, every_value: bool = False) -> Group:
    """The flags. `every_value`: where one is not given, all of its values take part, as in `check`."""
    defaults = ShardingConfig()
    unset = "every one" if every_value else ""
    return Group(
        "Mesh",
        (
            Option(MESH, "chips along x, y and z; a CPU shows as many host devices", metavar="X,Y,Z",
                   shown_default=default_mesh or "one device, no mesh"),
            Option("layout", "weights split by column over all chips, or by column and row", Kind.CHOICE,
                   choices=tuple(value.value for value in Layout),
                   shown_default=unset or defaults.layout.value),
            Option("attn_all_to_all", "mesh axes that attention splits the batch over", Kind.CHOICE,
                   choices=tuple(value.value for value in AttnAllToAll),
                   shown_default=unset or defaults.attn_all_to_all.value),
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
    sharding = ShardingConfig(
        Layout(flags["layout"] or defaults.layout),
        AttnAllToAll(flags["attn_all_to_all"] or defaults.attn_all_to_all),
        collectives,
    )
    return MeshOptions(MeshShape.parse(flags[MESH]), sharding)
