"""What a call of `profile` asks for when it compares collective matmuls, understood before jax starts.

Data flow: flags → `profile_plan` → `ProfilePlan` → `profile_run.run`.

Worked example: `--axis 2,4 --batch 8` asks for all forms of both functions on 2 and on 4 chips, with the
sizes of the embedded model's layers.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_engine.cli.grid_flags import DTYPES
from inference_engine.cli.lists import choices_of, numbers_of
from inference_engine.cli.measured_model import MeasuredModel, measured_model
from inference_engine.cli.options import Flags
from inference_engine.cli.registries import Registries
from inference_engine.cli.sweep_plan import MOST_HOST_DEVICES, at_least, path_of
from inference_engine.profiling.spread import LEAST_ROUNDS
from layers.collectives.mode import CollectiveMode
from layers.errors import UserError

OPS = ("allgather_matmul", "matmul_reducescatter")
XLA_FORMS = ("xla_tiled", "xla_partitioner")
FORMS = (*(mode.value for mode in CollectiveMode), *XLA_FORMS)


@dataclasses.dataclass(frozen=True)
class ProfilePlan:
    """What one call asks for.

    Attributes:
      model: whose sizes are taken, unless rows and cols are given.
      axis, batch, weights, activation_dtype, reduce_dtype, op, form: values that are combined.
      rows, cols: sizes of the product over all chips; None for the model's.
      layers: products of one program.
      rounds: timings of each.
      json, plot, chip: as in a sweep.
    """

    model: MeasuredModel
    axis: tuple[int, ...]
    batch: tuple[int, ...]
    weights: tuple[str, ...]
    activation_dtype: tuple[str, ...]
    reduce_dtype: tuple[str, ...]
    op: tuple[str, ...]
    form: tuple[str, ...]
    rows: int | None
    cols: int | None
    layers: int
    rounds: int
    json: bool
    plot: Path | None
    chip: Path | None

    @property
    def host_devices(self) -> int:
        """How many a CPU is to show."""
        return min(MOST_HOST_DEVICES, max(self.axis))


def profile_plan(flags: Flags, registries: Registries) -> ProfilePlan:
    """What the flags ask for; raises UserError."""
    refuse_given(flags, OF_A_STEP, "belongs to --step")
    at_least(flags, "rounds", LEAST_ROUNDS)
    at_least(flags, "layers", 1)
    if (flags["rows"] is None) != (flags["cols"] is None):
        raise UserError("--rows and --cols are the two sizes of one product; allowed: both or neither")
    if flags["rows"] is not None:
        at_least(flags, "rows", 1)
        at_least(flags, "cols", 1)
    lists: dict[str, Any] = {name: numbers_of(name, flags[name]) for name in ("axis", "batch")}
    lists |= {name: choices_of(name, flags[name], legal) for name, legal in CHOICES.items()}
    return ProfilePlan(
        model=measured_model(flags, registries.models),
        rows=flags["rows"],
        cols=flags["cols"],
        layers=flags["layers"],
        rounds=flags["rounds"],
        json=flags["json"],
        plot=path_of(flags, "plot"),
        chip=path_of(flags, "chip"),
        **lists,
    )


def refuse_given(flags: Flags, names: Sequence[str], why: str) -> None:
    """Refuses flags that would change nothing."""
    typed = [name for name in names if name in flags.given]
    if typed:
        raise UserError(f"--{typed[0]} {why}; allowed: one of the two uses of profile, see profile --help")


OF_A_STEP = ("mesh", "layout", "attn_all_to_all", "collectives", "context", "trace")
OF_COLLECTIVES = ("axis", "op", "form", "rows", "cols", "layers", "chip")
CHOICES: dict[str, tuple[str, ...]] = {**DTYPES, "op": OPS, "form": FORMS}
