"""The command `sweep`: its flags and its help; no jax before they are understood.

Data flow: flags → `sweep_plan` → `SweepPlan` → jax starts → `sweep_run.run` → exit code.

Worked example: `sweep --mesh 8 --batch 1,8 --out r.jsonl`, killed and started again, measures what is
missing.
"""

from inference_engine.cli.grid_flags import grid_group
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.measured_model import measured_group
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.registries import Registries
from inference_engine.cli.runtime import RuntimeOptions, runtime_group, start_jax
from inference_engine.cli.sweep_plan import sweep_plan
from inference_engine.profiling.settings import Method
from inference_engine.profiling.spread import LEAST_ROUNDS

_DESCRIPTION = (
    """Times the engine's own decode and prefill programs in every combination of mesh, layout, all-to-all,
    collectives, dtypes, batch and context, on the devices that are there; a CPU shows as many host devices
    as the largest mesh needs.""",
    """Each cell is a row, written to --out as soon as it is measured: settings, device, versions, times of
    every round, tokens/s, bytes a chip, share of the memory and FLOP bounds; or the reason why it cannot
    run; or the error. A sweep that was stopped, even killed, goes on where it was when it is started again
    with the same --out. The exit code is 1 when cells failed.""",
    """Cells come in random order. A few are held ready; whenever another one is compiled, each of them is
    timed once. The spread of a time is where the median of a second measurement is expected in 9 of 10
    cases.""",
)
_EXAMPLES = (
    ("which all-to-all, at which batch?", "--grid all_to_all --out all_to_all.jsonl --plot plots"),
    ("every mesh of 8 chips", "--mesh 8 --layout 2d --attn_all_to_all yzx --batch 1,8 --out meshes.jsonl"),
    ("what changed between two files", "compare before.jsonl after.jsonl"),
)
_CHIP = Option("chip", "JSON file with figures of the chip, such as memory_speed in bytes/s", metavar="FILE",
               shown_default="the table's; a CPU is measured")  # fmt: skip


def chip_option() -> Option:
    """The flag that overrides the device table."""
    return _CHIP


def sweep_command(registries: Registries) -> Command:
    """The command, with the grids and models of these registries."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        plan = sweep_plan(flags, registries)
        with phase("starting JAX", interrupts):
            start_jax(RuntimeOptions(flags["platform"], plan.host_devices))
            from inference_engine.cli import sweep_run
        return sweep_run.run(plan, interrupts)

    return Command(
        name="sweep",
        summary="time decode and prefill over meshes, layouts, all-to-alls, collectives, dtypes, batches",
        description=_DESCRIPTION,
        groups=(
            grid_group(registries.grids),
            measured_group(registries.models),
            _method_group(),
            _results_group(),
            runtime_group(),
        ),
        run=run,
        examples=_EXAMPLES,
    )


def _method_group() -> Group:
    method = Method()
    return Group(
        "How",
        (
            Option("rounds", "times that each cell is timed", Kind.INTEGER, method.rounds,
                   allowed=f"{LEAST_ROUNDS} and above", metavar="N"),
            Option("steps", "decode steps of a round", Kind.INTEGER, method.steps,
                   allowed="1 and above", metavar="N"),
            Option("held", "cells that are held ready and timed in turn", Kind.INTEGER, 8,
                   allowed="1 and above", metavar="N"),
            Option("seed", "of the cells' order", Kind.INTEGER, 0, metavar="N"),
            _CHIP,
        ),
    )  # fmt: skip


def _results_group() -> Group:
    return Group(
        "Results",
        (
            Option(
                "out", "JSONL file that rows are added to, and that says what is done already", metavar="FILE"
            ),
            Option("retry_failed", "run the file's failed cells again", Kind.SWITCH),
            Option("plot", "folder for plots of the grid's rows; needs the extra plots", metavar="DIR"),
            Option("json", "rows on stdout, one a line, instead of a table", Kind.SWITCH),
        ),
    )
