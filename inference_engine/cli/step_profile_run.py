"""Runs a plan of `profile --step`: the part that needs jax.

Data flow: `StepPlan` → `profile_step` → table, JSON, plot → exit code.

Worked example: a table of six parts, of the collectives by scope, and of the ten longest instructions.
"""

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.measured_model import described, open_state
from inference_engine.cli.progress import phase
from inference_engine.cli.step_plan import StepPlan
from inference_engine.cli.terminal import Output, Stream, note
from inference_engine.profiling.figures import check_plotting
from inference_engine.profiling.measure import Weights
from inference_engine.profiling.place import cpu_name, versions
from inference_engine.profiling.step_parts import COLLECTIVES
from inference_engine.profiling.step_plot import plot_step
from inference_engine.profiling.step_profile import StepProfile, profile_step
from layers.errors import UserError

WIDTH = 120


def run(plan: StepPlan, interrupts: Interrupts) -> int:
    """Traces and prints everything; returns the exit code. Raises UserError."""
    if plan.plot is not None:
        check_plotting(plan.plot)
    state = open_state(plan.model)
    with _folder(plan.trace) as folder, phase(f"tracing {plan.setting.step.value}", interrupts):
        found = profile_step(Weights(state), plan.setting, plan.method, folder)
    device, model = _device(), described(plan.model, state.hparams)
    if plan.json:
        value = {"schema": 1, "model": model, "device": device, "versions": versions(), **found.to_json()}
        Output().write(json.dumps(value, allow_nan=False) + "\n")
    else:
        Output().write(table(found))
    if plan.plot is not None:
        where = f"{plan.model.name} · {device}"
        note("plot", str(plot_step(found, where, plan.plot)), "dim")
    if plan.trace is not None:
        note("trace", f"{plan.trace} (for xprof; its perfetto_trace.json.gz for Perfetto)", "dim")
    return 0


@contextlib.contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    """The folder of the trace; one that goes away where none was named."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="palm-trace-") as made:
            yield Path(made)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "probe").touch()
        (path / "probe").unlink()
    except OSError as error:
        raise UserError(f"--trace={path} cannot be written ({error.strerror}); allowed: a folder") from None
    yield path


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return cpu_name() if device.platform == "cpu" else device.device_kind


def table(found: StepProfile) -> str:
    """Parts, collectives by scope, and the longest instructions."""
    from rich.console import Console
    from rich.table import Table

    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=Stream.OUT.is_terminal, highlight=False)
    timing, made = found.timing, found.split
    console.print(
        f"{found.setting.words()}: {1e3 * timing.median:.2f} ms a step "
        f"({1e3 * timing.spread_low:.2f}–{1e3 * timing.spread_high:.2f}), {1e3 * found.traced:.2f} ms "
        f"traced; instructions of a chip {1e3 * made.total:.2f} ms"
    )
    parts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (("part", "left"), ("ms", "right"), ("share", "right")):
        parts.add_column(name, justify=justify)  # type: ignore[arg-type]
    for part, seconds in made.parts.items():
        parts.add_row(part, f"{1e3 * seconds:.3f}", f"{seconds / made.total:.1%}")
        if part == COLLECTIVES:
            for scope, share in made.collectives.items():
                parts.add_row(f"  of {scope}", f"{1e3 * share:.3f}", f"{share / made.total:.1%}")
    console.print(parts)
    top = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("longest instructions", "opcode", "part", "scope"):
        top.add_column(name)
    top.add_column("ms", justify="right")
    for row in made.top:
        words = (row["name"], row["opcode"], row["part"], row["scope"])
        top.add_row(*words, f"{1e3 * row['seconds']:.3f}")
    console.print(top)
    return text.getvalue()
