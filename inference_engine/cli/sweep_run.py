"""Runs a plan of `sweep`: the part that needs jax.

Data flow: `SweepPlan` → results file, devices, weights → cells that have no row yet → `Sweep.run` → rows in
the file → table, JSON or plots → exit code.

Worked example: 100 cells of which the file has 60: the other 40 run, and the table shows 100.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpoints.load import WeightsDtype
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.measured_model import described, open_state
from inference_engine.cli.memory import available_bytes, check_memory
from inference_engine.cli.model import on_cpu
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.sweep_plan import SweepPlan
from inference_engine.cli.sweep_table import table
from inference_engine.cli.terminal import Output, note
from inference_engine.profiling.chips import overridden
from inference_engine.profiling.figures import check_plotting
from inference_engine.profiling.measure import Weights, engine_config
from inference_engine.profiling.place import Place, find_place
from inference_engine.profiling.plots import plot
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Setting
from inference_engine.profiling.store import Store, StoreError
from inference_engine.profiling.sweep import Sweep
from layers.errors import UserError
from layers.hparams import HParams

FAILED = 1


@dataclasses.dataclass
class _Outcome:
    """Rows of the grid so far, and how to show them."""

    plan: SweepPlan
    total: int
    rows: list[Row]
    added: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    def count(self, status: Status) -> int:
        """Rows of a status."""
        return sum(row.status is status for row in self.rows)

    def print(self) -> None:
        """The table or the rows, on stdout."""
        text = "".join(row.to_line() for row in self.rows) if self.plan.json else table(self.rows)
        Output().write(text)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(status)} {status.value}" for status in Status if self.count(status))
        where = "" if self.plan.out is None else f", in {self.plan.out}"
        names = {"load_seconds": "loading", "compile_seconds": "compiling", "run_seconds": "running"}
        now = self.rows[len(self.rows) - self.added :]
        spent = {name: sum(row.figures.get(name, 0.0) for row in now) for name in names}
        of_that = ", ".join(f"{spent[name]:.0f} s {words}" for name, words in names.items())
        return (
            f"{len(self.rows)} of {self.total} cells: {counts or 'none'}; {self.added} measured now in "
            f"{time.monotonic() - self.began:.0f} s ({of_that}){where}"
        )

    def interrupted(self) -> str:
        """Prints what is done; returns what to say of it."""
        self.print()
        return self.summary()


def run(plan: SweepPlan, interrupts: Interrupts) -> int:
    """Measures what is missing and prints everything; returns the exit code. Raises UserError."""
    settings = plan.grid.cells(plan.seed)
    state = open_state(plan.model)
    if plan.plot is not None:
        check_plotting(plan.plot)
    with _opened(plan) as store:
        earlier = [] if store is None else store.rows
        place = find_devices(plan.chip, earlier, interrupts)
        sweep = Sweep(
            Weights(state), described(plan.model, state.hparams), place, plan.method,
            _memory_check(plan, state.hparams), plan.held, plan.seed,
        )  # fmt: skip
        done = _done(sweep, settings, earlier, plan.retry_failed)
        waiting = [setting for setting in settings if setting not in done]
        outcome = _Outcome(plan, len(settings), list(done.values()))
        try:
            _measure(sweep, waiting, store, outcome, interrupts)
        except StoreError as error:
            outcome.print()
            note("error", str(error), "bold red")
            return FAILED
    outcome.print()
    if plan.plot is not None:
        for path in plot(outcome.rows, plan.plot):
            note("plot", str(path), "dim")
    return _verdict(outcome)


def _measure(
    sweep: Sweep, waiting: Sequence[Setting], store: Store | None, outcome: _Outcome, interrupts: Interrupts
) -> None:
    """Runs the cells that wait; every row is in the file before the next cell's work goes on."""
    with (
        interrupts.closing(outcome.interrupted),
        phase(f"sweeping {len(waiting)} cells", interrupts, Unit.CASES) as update,
    ):
        update(0, len(waiting))

        def add(row: Row) -> None:
            with interrupts.held():
                if store is not None:
                    store.add(row)
                outcome.rows.append(row)
                outcome.added += 1

        # Compiling is nearly all of a sweep, and a cell's row comes a few compilations later.
        sweep.run(waiting, add, lambda begun: update(begun, len(waiting)))


def _verdict(outcome: _Outcome) -> int:
    failed = outcome.count(Status.FAILED)
    if outcome.count(Status.ILLEGAL) == len(outcome.rows):
        raise UserError(f"none of the {len(outcome.rows)} cells can run; the first: {outcome.rows[0].reason}")
    note("failed" if failed else "", outcome.summary(), "bold red" if failed else "dim")
    return FAILED if failed else 0


@contextlib.contextmanager
def _opened(plan: SweepPlan) -> Iterator[Store | None]:
    if plan.out is None:
        yield None
        return
    with Store.open(plan.out) as store:
        if store.dropped:
            note("repaired", f"{plan.out}: {store.dropped} bytes of a half-written row cut off", "yellow")
        yield store


def find_devices(chip: Path | None, earlier: Sequence[Row], interrupts: Interrupts) -> Place:
    """Where it runs, with the figures of the file `chip` if there is one; `earlier` rows know this CPU."""
    with phase("measuring this CPU" if on_cpu() else "reading the device table", interrupts):
        place = find_place([row.device for row in earlier])
    if chip is not None:
        return dataclasses.replace(place, chip=overridden(place.chip, chip))
    if not place.chip.known:
        note("unknown device", f"{place.kind}: no share of a bound; --chip FILE gives its figures", "yellow")
    return place


def _done(
    sweep: Sweep, settings: Sequence[Setting], earlier: Sequence[Row], retry_failed: bool
) -> dict[Setting, Row]:
    """The rows that the file has already, by setting; of a retried cell the latest."""
    latest = {row.key: row for row in earlier if not (retry_failed and row.status is Status.FAILED)}
    found = {setting: latest.get(sweep.row(setting).key) for setting in settings}
    return {setting: row for setting, row in found.items() if row is not None}


def _memory_check(plan: SweepPlan, hparams: HParams) -> "_MemoryCheck":
    available = available_bytes()
    return _MemoryCheck(plan, hparams, available, 1 if on_cpu() else None)


@dataclasses.dataclass(frozen=True)
class _MemoryCheck:
    """Refuses a cell whose weights and cache certainly do not fit; host devices share their memory."""

    plan: SweepPlan
    hparams: HParams
    available: int | None
    memories: int | None

    def __call__(self, setting: Setting) -> None:
        chips = self.memories or setting.mesh.size
        room = None if self.available is None else self.available * chips
        config = engine_config(setting, self.plan.method)
        check_memory(self.hparams, WeightsDtype(setting.weights), config, room)
