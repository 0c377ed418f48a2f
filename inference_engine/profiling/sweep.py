"""Runs the cells of a grid and hands on a row for each, whatever happens to it.

Cells come in random order, and a few are held ready at a time. Whenever another one has been compiled, each
of those is timed once, in random order; after its last round a cell leaves. So the rounds of one cell lie as
far apart as other cells take to compile, and hold what changes on the machine meanwhile; and a slow minute
meets neighbours of chance and not one factor's values. A cell that something refuses is a row with the
refusal's text; one that breaks is a row with the error's.

Data flow: `Setting`s → `prepare` → visits, each a round of every cell that is ready → `Row` → `add`.

Worked example: 20 cells, 8 held, 7 rounds: in the visit after the 8th compilation eight cells are timed; the
first one has its 7 rounds and its row, and makes room for the 9th.
"""

import collections
import dataclasses
import datetime as dt
import itertools
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from inference_engine.profiling.bounds import bound
from inference_engine.profiling.compare import RUN, VISITS
from inference_engine.profiling.measure import Subject, Weights, prepare
from inference_engine.profiling.place import Place
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Method, Setting
from inference_engine.profiling.spread import Timing
from layers.errors import UserError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
HELD = 8
PAUSE_SECONDS = 1.0  # between visits where no compilation lies, so that rounds are apart at the end as well
_REASON = 600  # characters of an error's text that a row keeps


def _allow(setting: Setting) -> None:
    del setting


def _ignore(count: int) -> None:
    del count


@dataclasses.dataclass(eq=False)
class _Ready:
    """A prepared cell and its rounds so far, with the visits in which they were taken."""

    subject: Subject
    started: str
    rounds: list[float] = dataclasses.field(default_factory=list)
    visits: list[int] = dataclasses.field(default_factory=list)
    spent: float = 0.0
    error: Exception | None = None

    def time(self, visit: int, *, cold: bool) -> None:
        """One round; if something was compiled just before (`cold`), one goes first that does not count."""
        if self.error is not None:
            return
        began = time.perf_counter()
        try:
            if cold:
                self.subject.run()
            self.rounds.append(self.subject.run())
            self.visits.append(visit)
        except Exception as error:
            self.error = error
        self.spent += time.perf_counter() - began


@dataclasses.dataclass
class Sweep:
    """What every cell of a sweep has in common.

    Attributes:
      weights: the model's.
      model: what rows say of it.
      place, method: see there.
      check: refuses a setting before it is prepared, or does nothing.
      held: cells that are held ready at a time; fewer once memory has no room for so many.
      seed: of the order within a visit.
    """

    weights: Weights
    model: dict[str, Any]
    place: Place
    method: Method = Method()
    check: Callable[[Setting], None] = _allow
    held: int = HELD
    seed: int = 0

    def row(self, setting: Setting, status: Status = Status.OK, **outcome: Any) -> Row:
        """A row of this sweep."""
        return Row(
            setting=setting.to_json(),
            model=self.model,
            method=dataclasses.asdict(self.method),
            device=self.place.device(),
            versions=self.place.versions,
            status=status,
            **outcome,
        )

    def run(
        self,
        settings: Sequence[Setting],
        add: Callable[[Row], None],
        begun: Callable[[int], None] = _ignore,
    ) -> None:
        """Measures every setting and adds its row; `begun` is told how many are prepared or refused."""
        waiting, ready = collections.deque(settings), list[_Ready]()
        order, name = random.Random(self.seed), uuid.uuid4().hex[:8]
        for visit in itertools.count():
            cold = self._prepare_next(waiting, ready, add)
            begun(len(settings) - len(waiting))
            if not cold and visit:
                time.sleep(PAUSE_SECONDS)
            for cell in order.sample(ready, len(ready)):
                cell.time(visit, cold=cold)
            # At the end the last ones stay together, so that they can be compared round by round.
            last = not waiting and not all(self._done(cell) for cell in ready)
            for cell in [] if last else [cell for cell in ready if self._done(cell)]:
                ready.remove(cell)
                add(self._finished(cell, name))
            if not waiting and not ready:
                return

    def _done(self, cell: "_Ready") -> bool:
        return cell.error is not None or len(cell.rounds) >= self.method.rounds

    def _prepare_next(
        self, waiting: collections.deque[Setting], ready: "list[_Ready]", add: Callable[[Row], None]
    ) -> bool:
        """Prepares one more cell if there is room; what cannot be prepared is added as a row on the way."""
        while waiting and len(ready) < self.held:
            setting, started = waiting.popleft(), _now()
            try:
                self.check(setting)
                ready.append(_Ready(prepare(self.weights, setting, self.method), started))
            except UserError as error:
                add(self.row(setting, Status.ILLEGAL, reason=_line(error), started=started))
            except Exception as error:
                if ready and _OUT_OF_MEMORY in str(error):  # perhaps there is room once one of these is gone
                    waiting.appendleft(setting)
                    self.held = len(ready)
                    return False
                add(self.row(setting, Status.FAILED, reason=_line(error), started=started))
            else:
                return True
        return False

    def _finished(self, cell: "_Ready", name: str) -> Row:
        """The row of a cell that has all its rounds, or has broken."""
        setting, started = cell.subject.setting, cell.started
        if cell.error is not None:
            return self.row(setting, Status.FAILED, reason=_line(cell.error), started=started)
        timing = Timing.of(cell.rounds)
        figures = self._figures(cell.subject, timing)
        figures |= {"run_seconds": cell.spent, RUN: name, VISITS: cell.visits}
        return self.row(setting, timing=timing, figures=figures, started=started)

    def _figures(self, subject: Subject, timing: Timing) -> dict[str, Any]:
        """What follows from time and sizes; shares are None where the chip's figures are not known."""
        setting, seconds, chips = subject.setting, timing.median, subject.setting.mesh.size
        least = bound(subject.work, self.place.chip_of(chips), setting.activation_dtype)
        return {
            "tokens_per_second": subject.tokens / seconds,
            "ms_per_token": 1e3 * seconds * setting.batch / subject.tokens,
            "chip_seconds_per_token": seconds * chips / subject.tokens,
            "weight_bytes_per_chip": subject.weight_bytes,
            "cache_bytes_per_chip": subject.cache_bytes,
            "flops_per_chip": subject.work.flops,
            "read_bytes_per_chip": subject.work.memory_bytes,
            "sent_bytes_per_chip": subject.work.sent_bytes or None,
            "memory_share": None if least.memory is None else least.memory / seconds,
            "flops_share": None if least.flops is None else least.flops / seconds,
            "links_share": None if least.links is None else least.links / seconds,
            "compile_seconds": subject.compile_seconds,
            "load_seconds": subject.load_seconds,
        }


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _line(error: Exception) -> str:
    """An error's text as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    named = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
    return named if len(named) <= _REASON else named[: _REASON - 1] + "…"
