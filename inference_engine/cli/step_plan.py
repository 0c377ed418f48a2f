"""What a call of `profile --step` asks for, understood before jax starts.

Data flow: flags → `step_plan` → `StepPlan` → `step_profile_run.run`.

Worked example: `--step decode --mesh 4,2,1 --batch 16` is the decode step of 16 texts on 4,2,1 in 2D.
"""

import dataclasses
from pathlib import Path
from typing import Any

from inference_engine.cli.lists import choices_of, numbers_of
from inference_engine.cli.measured_model import MeasuredModel, measured_model
from inference_engine.cli.mesh_flags import MESH
from inference_engine.cli.options import Flags
from inference_engine.cli.profile_plan import CHOICES, OF_COLLECTIVES, refuse_given
from inference_engine.cli.registries import Registries
from inference_engine.cli.sweep_plan import at_least, path_of
from inference_engine.profiling.settings import Method, Setting, Step
from inference_engine.profiling.spread import LEAST_ROUNDS
from layers.collectives.mode import CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one call asks for; `trace` and `plot` are folders, None for none."""

    setting: Setting
    model: MeasuredModel
    method: Method
    trace: Path | None
    plot: Path | None
    json: bool


def step_plan(flags: Flags, registries: Registries) -> StepPlan:
    """What the flags ask for; raises UserError."""
    refuse_given(flags, OF_COLLECTIVES, "belongs to the collective matmuls, and --step is given")
    at_least(flags, "rounds", LEAST_ROUNDS)
    at_least(flags, "context", 1)
    setting = Setting(
        step=Step(flags["step"]),
        mesh=MeshShape.parse(flags[MESH]),
        layout=Layout(flags["layout"]),
        attn_all_to_all=AttnAllToAll(flags["attn_all_to_all"]),
        collectives=CollectiveMode(flags["collectives"]),
        reduce_dtype=_one(flags, "reduce_dtype"),
        weights=_one(flags, "weights"),
        activation_dtype=_one(flags, "activation_dtype"),
        batch=_single("batch", numbers_of("batch", flags["batch"])),
        context=flags["context"],
    )
    return StepPlan(
        setting=setting,
        model=measured_model(flags, registries.models),
        method=Method(rounds=flags["rounds"]),
        trace=path_of(flags, "trace"),
        plot=path_of(flags, "plot"),
        json=flags["json"],
    )


def _one(flags: Flags, name: str) -> str:
    return str(_single(name, choices_of(name, flags[name], CHOICES[name])))


def _single(name: str, values: tuple[Any, ...]) -> Any:
    if len(values) != 1:
        raise UserError(f"--{name} has {len(values)} values; allowed with --step: one")
    return values[0]
