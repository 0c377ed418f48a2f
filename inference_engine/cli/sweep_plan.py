"""What a call of `sweep` asks for, understood before jax starts.

Data flow: flags → `sweep_plan` → `SweepPlan` → `sweep_run.run`.

Worked example: `--mesh 8 --out r.jsonl` is a grid of the ten meshes of 8 chips whose rows go to r.jsonl.
"""

import dataclasses
from pathlib import Path

from inference_engine.cli.grid_flags import grid_of
from inference_engine.cli.measured_model import MeasuredModel, measured_model
from inference_engine.cli.options import Flags
from inference_engine.cli.registries import Registries
from inference_engine.profiling.settings import Grid, Method
from inference_engine.profiling.spread import LEAST_ROUNDS
from layers.errors import UserError
from layers.mesh_shape import host_devices_needed

MOST_HOST_DEVICES = 64
"""Host devices that a sweep makes: meshes of more chips are refused as such where the grid runs on a CPU."""


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """What one call asks for.

    Attributes:
      grid, model, method: see there.
      out: the results file; None for none.
      plot: folder of the plots; None for none.
      json: rows on stdout instead of a table.
      held: cells that are held ready and timed in turn.
      seed: of the order of the cells.
      retry_failed: whether failed cells of the file run again.
      chip: file with figures of the chip; None for the table's.
    """

    grid: Grid
    model: MeasuredModel
    method: Method
    out: Path | None
    plot: Path | None
    json: bool
    held: int
    seed: int
    retry_failed: bool
    chip: Path | None

    @property
    def host_devices(self) -> int:
        """How many a CPU is to show."""
        needed = map(host_devices_needed, self.grid.mesh)
        return max((chips for chips in needed if chips <= MOST_HOST_DEVICES), default=1)


def sweep_plan(flags: Flags, registries: Registries) -> SweepPlan:
    """What the flags ask for; raises UserError."""
    at_least(flags, "rounds", LEAST_ROUNDS)
    at_least(flags, "steps", 1)
    at_least(flags, "held", 1)
    return SweepPlan(
        grid=grid_of(flags, registries.grids),
        model=measured_model(flags, registries.models),
        method=Method(flags["rounds"], flags["steps"]),
        out=path_of(flags, "out"),
        plot=path_of(flags, "plot"),
        json=flags["json"],
        held=flags["held"],
        seed=flags["seed"],
        retry_failed=flags["retry_failed"],
        chip=path_of(flags, "chip"),
    )


def at_least(flags: Flags, name: str, least: int) -> None:
    """Refuses a smaller number."""
    if flags[name] < least:
        raise UserError(
            f"--{name}={flags[name]} is not allowed; allowed: {least} and above; nearest: {least}"
        )


def path_of(flags: Flags, name: str) -> Path | None:
    """A flag's path; raises UserError for an empty one."""
    if flags[name] == "":
        raise UserError(f"--{name} is empty; it needs a path")
    return None if flags[name] is None else Path(flags[name])
