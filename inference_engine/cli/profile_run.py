"""Runs a plan of `profile` that compares collective matmuls: the part that needs jax.

Data flow: `ProfilePlan` → problems → `collectives.measure` → rows → table, JSON, plot → exit code.

Worked example: 2 functions on 2, 4 and 8 chips in 6 forms are 6 problems and 36 rows.
"""

import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence

import jax

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.measured_model import open_state
from inference_engine.cli.profile_plan import ProfilePlan
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.sweep_run import find_devices
from inference_engine.cli.sweep_table import share
from inference_engine.cli.terminal import Output, Stream, note
from inference_engine.profiling.collective_plots import plot_collectives
from inference_engine.profiling.collectives import FORMS, FormRow, Op, Problem, measure
from inference_engine.profiling.figures import check_plotting
from inference_engine.profiling.place import Place
from layers.errors import UserError
from layers.hparams import HParams

WIDTH = 150


def run(plan: ProfilePlan, interrupts: Interrupts) -> int:
    """Measures and prints everything; returns the exit code. Raises UserError."""
    if plan.plot is not None:
        check_plotting(plan.plot)
    sizes = _sizes(plan)
    place = find_devices(plan.chip, [], interrupts)
    rows: list[FormRow] = []
    refused: list[str] = []

    def show() -> str:
        Output().write(_json(plan, place, rows, refused) if plan.json else table(rows))
        return f"{len(rows)} rows measured"

    forms = [form for form in FORMS if form.value in plan.form]
    makers = list(_problems(plan, sizes))
    with interrupts.closing(show), phase("profiling collectives", interrupts, Unit.CASES) as update:
        for done, make in enumerate(makers):
            update(done, len(makers))
            try:
                rows += measure(make(), forms, plan.rounds, place)
            except UserError as error:
                refused.append(str(error))
    if not rows:
        raise UserError(refused[0])
    show()
    for reason in refused:
        note("illegal", reason, "yellow")
    if plan.plot is not None:
        for path in plot_collectives(rows, place, plan.plot):
            note("plot", str(path), "dim")
    bad = [row for row in rows if not row.ok]
    for row in bad:
        words = f"{row.form} of {row.problem.op.value} on {row.problem.chips}: error {row.error:.1e}"
        note("failed", words, "bold red")
    return 1 if bad else 0


def _sizes(plan: ProfilePlan) -> dict[str, tuple[int, int]]:
    """Rows and columns of each function's product, over all chips."""
    if plan.rows is not None and plan.cols is not None:
        return dict.fromkeys(plan.op, (plan.rows, plan.cols))
    made = layer_sizes(open_state(plan.model).hparams)
    return {name: made[Op(name)] for name in plan.op}


def layer_sizes(hparams: HParams) -> dict[Op, tuple[int, int]]:
    """The products of a fused 2D layer: into q | W0 | W1, and from attention | ff back."""
    attention = hparams.heads * hparams.qkv
    into = attention + (2 if hparams.act.gated else 1) * hparams.ff
    return {
        Op.MATMUL_REDUCESCATTER: (hparams.embed, into),
        Op.ALLGATHER_MATMUL: (attention + hparams.ff, hparams.embed),
    }


def _problems(plan: ProfilePlan, sizes: dict[str, tuple[int, int]]) -> Iterator[Callable[[], Problem]]:
    """Makers of every combination: one that is refused says so when it is made."""
    for op, chips, batch, weights, activation, reduce_dtype in itertools.product(
        plan.op, plan.axis, plan.batch, plan.weights, plan.activation_dtype, plan.reduce_dtype
    ):
        if op == Op.ALLGATHER_MATMUL.value and reduce_dtype != plan.reduce_dtype[0]:
            continue  # nothing is reduced

        def make(
            op: str = op, chips: int = chips, batch: int = batch,
            dtypes: tuple[str, str, str] = (weights, activation, reduce_dtype),
        ) -> Problem:  # fmt: skip
            _check_axis(chips, sizes[op])
            return Problem(Op(op), chips, batch, *sizes[op], *dtypes, layers=plan.layers)

        yield make


def _check_axis(chips: int, sizes: tuple[int, int]) -> None:
    """Refuses an axis of more chips than there are; raises UserError with the largest that is legal."""
    there = jax.device_count()
    if chips > there:
        largest = max(n for n in range(1, there + 1) if not any(size % n for size in sizes))
        raise UserError(f"--axis={chips}: there are {there} devices; nearest: --axis {largest}")


def _json(plan: ProfilePlan, place: Place, rows: Sequence[FormRow], refused: Sequence[str]) -> str:
    value = {
        "schema": 1,
        "device": place.device(),
        "versions": place.versions,
        "rounds": plan.rounds,
        "rows": [row.to_json() for row in rows],
        "illegal": list(refused),
    }
    return json.dumps(value, allow_nan=False) + "\n"


def table(rows: Sequence[FormRow]) -> str:
    """The rows, problem by problem, the fastest form first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("function", "chips", "batch", "product", "weights", "activations", "sums", "form"):
        shown.add_column(name, no_wrap=True)
    for name in ("µs a layer", "spread", "sent by a chip", "of the bound", "error"):
        shown.add_column(name, no_wrap=True, justify="right")
    for problem in dict.fromkeys(row.problem for row in rows):
        p = dataclasses.replace(problem)
        for row in sorted((r for r in rows if r.problem == problem), key=lambda r: r.timing.median):
            t = row.timing
            shown.add_row(
                p.op.value, str(p.chips), str(p.batch), f"{p.rows}×{p.cols}", p.weights, p.activation_dtype,
                p.reduce_dtype, row.form, f"{1e6 * t.median:,.0f}",
                f"{1e6 * t.spread_low:,.0f}–{1e6 * t.spread_high:,.0f}", f"{p.sent_bytes / 1e3:,.1f} kB",
                share(row.share), Text(f"{row.error:.0e}", style="" if row.ok else "bold red"),
            )  # fmt: skip
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=Stream.OUT.is_terminal, highlight=False)
    console.print(shown)
    return text.getvalue()
