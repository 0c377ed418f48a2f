"""Progress on stderr for what takes more than two seconds, and silence for the rest.

Idea: a bar that flashes by is noise, so a phase shows itself only after a delay, by a timer. On a terminal
it is a bar with bytes, or a spinner where the end is not known, gone when the phase ends. Where stderr is
a file it is a line that says what is going on, and one with the count every few seconds while that moves.

Data flow: `phase(label, …)` → timer → rich progress bar; `update(done, total)` moves it.

Worked example: inside `with phase("loading weights", interrupts, Unit.BYTES) as update`, a call of
`update(3_000_000, 17_300_000)` shows, from the third second on, "loading weights ━━━━ 3.0/17.3 MB 0:00:02";
in a file "loading weights … 3.0 of 17.3 MB, 2 s".
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.terminal import Stream, note

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_SECONDS = 2.0
LINE_SECONDS = 10.0
"""Time between two lines where stderr is no terminal."""
_SPEED_SECONDS = 3600.0  # what the remaining time is estimated from: some cases take minutes
Update = Callable[[int, int], None]
"""Called with (done, total)."""


class Unit(enum.Enum):
    """What a phase counts."""

    NOTHING = "nothing"  # its end is not known
    BYTES = "bytes"
    SAMPLES = "samples"
    CASES = "cases"
    WINDOWS = "windows"


@contextlib.contextmanager
def phase(
    label: str,
    interrupts: Interrupts,
    unit: Unit = Unit.NOTHING,
    delay: float = DELAY_SECONDS,
    every: float = LINE_SECONDS,
) -> Iterator[Update]:
    """Shows a phase of the work if it lasts longer than `delay` seconds; in a file a line `every` so many."""
    shown = _Phase(label, unit, every)
    timer = threading.Timer(delay, shown.show)
    timer.daemon = True
    timer.start()
    with interrupts.closing(shown.hide):
        try:
            yield shown.update
        finally:
            timer.cancel()
            shown.hide()


class _Phase:
    """One phase; the timer's thread shows it, the main thread updates and hides it."""

    def __init__(self, label: str, unit: Unit, every: float = LINE_SECONDS) -> None:
        self._label, self._unit, self._every = label, unit, every
        self._lock = threading.RLock()  # an interrupt hides the phase wherever its thread is
        self._bar: Progress | None = None
        self._over = False
        self._done, self._total = 0, 0
        self._began = time.monotonic()
        self._next_line: float | None = None

    def show(self) -> None:
        """Starts the bar, or writes the line where stderr is no terminal."""
        with self._lock:
            if self._over:
                return
            if not Stream.ERR.is_terminal:
                self._line()
                return
            self._bar = _bar(self._unit)
            total = self._total or None
            self._bar.add_task(self._label, total=total, completed=self._done)
            self._bar.tasks[0].start_time = self._began  # the bar appears late, its clock does not
            self._bar.start()

    def update(self, done: int, total: int) -> None:
        """Says how far the phase is."""
        with self._lock:
            self._done, self._total = done, total
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            elif self._next_line is not None and time.monotonic() >= self._next_line:
                self._line()

    def _line(self) -> None:
        """Writes a line; the next one may come some seconds later."""
        now = time.monotonic()
        count = _count(self._unit, self._done, self._total)
        note("", f"{self._label} …" + (count and f" {count}, {now - self._began:.0f} s"), "")
        self._next_line = now + self._every

    def hide(self) -> str:
        """Takes the bar away; a timer that fires later shows nothing. There is nothing to say of it."""
        with self._lock:
            self._over = True
            if self._bar is not None:
                self._bar.stop()
        return ""


def _count(unit: Unit, done: int, total: int) -> str:
    """How far a phase is, in words; empty where nothing is counted."""
    if unit is Unit.NOTHING or not total:
        return ""
    if unit is Unit.BYTES:
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
    return f"{done} of {total} {unit.value}"


def _bar(unit: Unit) -> "Progress":
    from rich import progress
    from rich.console import Console

    middle: dict[Unit, tuple[progress.ProgressColumn, ...]] = {
        Unit.NOTHING: (),
        Unit.BYTES: (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()),
        Unit.SAMPLES: (progress.BarColumn(), progress.MofNCompleteColumn()),
        Unit.CASES: (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
        Unit.WINDOWS: (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
    }
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        *middle[unit],
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        get_time=time.monotonic,
        speed_estimate_period=_SPEED_SECONDS,
        transient=True,
        redirect_stdout=False,  # what goes to stdout is the result
        redirect_stderr=False,
    )
