"""Runs the cells of a grid and hands on a row for each, whatever happens to it.

Cells come in random order, a few at a time: each of these is compiled, then all are timed in turn, round
after round. So a slow minute of the machine meets neighbours of chance and not one factor's values, and the
rounds of one cell are apart. A cell that something refuses is a row with the refusal's text; one that breaks
is a row with the error's.

Data flow: `Setting`s → `prepare` → rounds in turn → `Row` → `add`.

Worked example: 6 cells in blocks of 4, 7 rounds: 4 are compiled, timed 7 times each in turn, 4 rows are
added; then the other 2.
"""

import collections
import dataclasses
import datetime as dt
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from inference_engine.profiling.bounds import bound
from inference_engine.profiling.compare import BLOCK
from inference_engine.profiling.measure import Subject, Weights, prepare
from inference_engine.profiling.place import Place
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Method, Setting
from inference_engine.profiling.spread import Timing
from layers.errors import UserError

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_REASON = 600  # characters of an error's text that a row keeps


def _allow(setting: Setting) -> None:
    del setting


@dataclasses.dataclass
class Sweep:
    """What every cell of a sweep has in common.

    Attributes:
      weights: the model's.
      model: what rows say of it.
      place, method: see there.
      check: refuses a setting before it is prepared, or does nothing.
      block: cells that are timed in turn.
      seed: of the order within a round.
    """

    weights: Weights
    model: dict[str, Any]
    place: Place
    method: Method = Method()
    check: Callable[[Setting], None] = _allow
    block: int = 4
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

    def run(self, settings: Sequence[Setting], add: Callable[[Row], None]) -> None:
        """Measures every setting and adds its row."""
        waiting = collections.deque(settings)
        order = random.Random(self.seed)
        while waiting:
            block = self._prepare_block(waiting, add)
            for row in self._time(block, order):
                add(row)

    def _prepare_block(
        self, waiting: collections.deque[Setting], add: Callable[[Row], None]
    ) -> list[tuple[Subject, str]]:
        """The next few cells, prepared; what cannot be is added as a row."""
        block: list[tuple[Subject, str]] = []
        while waiting and len(block) < self.block:
            setting, started = waiting.popleft(), _now()
            try:
                self.check(setting)
                block.append((prepare(self.weights, setting, self.method), started))
            except UserError as error:
                add(self.row(setting, Status.ILLEGAL, reason=_line(error), started=started))
            except Exception as error:
                if block and _OUT_OF_MEMORY in str(error):  # perhaps there is room once these are gone
                    waiting.appendleft(setting)
                    return block
                add(self.row(setting, Status.FAILED, reason=_line(error), started=started))
        return block

    def _time(self, block: Sequence[tuple[Subject, str]], order: random.Random) -> list[Row]:
        """All rounds of all cells of a block, in turn."""
        rounds: list[list[float]] = [[] for _ in block]
        broken: dict[int, Exception] = {}
        spent = [0.0] * len(block)
        for number in range(self.method.rounds + 1):
            for index in order.sample(range(len(block)), len(block)):
                if index in broken:
                    continue
                began = time.perf_counter()
                try:
                    seconds = block[index][0].run()
                except Exception as error:
                    broken[index] = error
                    continue
                spent[index] += time.perf_counter() - began
                if number:  # the first round warms up
                    rounds[index].append(seconds)
        rows = []
        together = uuid.uuid4().hex[:8]
        for index, (subject, started) in enumerate(block):
            if index in broken:
                reason = _line(broken[index])
                rows.append(self.row(subject.setting, Status.FAILED, reason=reason, started=started))
                continue
            timing = Timing.of(rounds[index])
            figures = self._figures(subject, timing) | {"run_seconds": spent[index], BLOCK: together}
            rows.append(self.row(subject.setting, timing=timing, figures=figures, started=started))
        return rows

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
