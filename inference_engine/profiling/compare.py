"""What differs between two sets of rows beyond noise; no jax.

Rows are matched by setting and model. Two settings can be compared as well: rows where some factors have one
value against rows where they have another, matched by all other factors. Rows whose rounds were taken side by
side, in the same visits of one run, are compared round by round, others by their spreads; see spread.py.

Data flow: two lists of rows → pairs → `Pair`s with a `Change`, and what only one side has → `Comparison`.

Worked example: 30 rows before and after a change of the code, 28 in both files: 2 slower, 1 faster, 25
without a difference, 2 only before.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.spread import LEAST_ROUNDS, Change, change, paired_change

LEAST = 0.03
"""Smaller differences than 3 % are not named: another load of the same program moves by that much."""
RUN, VISITS = "run", "visits"
"""Figures of a row: which run of a sweep it is from, and in which of its visits each round was taken."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """One setting on both sides; without times where either was not measured."""

    before: Row
    after: Row
    change: Change | None

    @property
    def ratio(self) -> float | None:
        """Time after over time before."""
        if self.before.timing is None or self.after.timing is None:
            return None
        return self.after.timing.median / self.before.timing.median

    def to_json(self) -> dict[str, Any]:
        """The setting, both outcomes and the verdict."""
        sides = {
            name: {"status": row.status.value, "median": None if row.timing is None else row.timing.median}
            for name, row in (("before", self.before), ("after", self.after))
        }
        verdict = None if self.change is None else self.change.value
        return {"setting": self.before.setting, **sides, "ratio": self.ratio, "change": verdict}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that two lists of rows say of each other."""

    pairs: tuple[Pair, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]

    def count(self, kind: Change) -> int:
        """Pairs of a kind."""
        return sum(pair.change is kind for pair in self.pairs)

    @property
    def ratio(self) -> float | None:
        """Median of all ratios: far from 1 without a reason, the machine was another one."""
        ratios = [pair.ratio for pair in self.pairs if pair.ratio is not None]
        return statistics.median(ratios) if ratios else None

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs],
            "median_ratio": self.ratio,
            "only_before": [row.setting for row in self.only_before],
            "only_after": [row.setting for row in self.only_after],
        }


def compare(
    before: Sequence[Row],
    after: Sequence[Row],
    least: float = LEAST,
    left: Mapping[str, str] | None = None,
    right: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares rows. `left` and `right` fix factors of the two sides, which are then not matched by them."""
    left, right = left or {}, right or {}
    freed = {*left, *right}
    ours, theirs = _by_setting(before, left, freed), _by_setting(after, right, freed)
    pairs = [_pair(ours[key], theirs[key], least) for key in ours if key in theirs]
    return Comparison(
        tuple(sorted(pairs, key=lambda pair: (pair.ratio is None, -abs((pair.ratio or 1) - 1)))),
        tuple(row for key, row in ours.items() if key not in theirs),
        tuple(row for key, row in theirs.items() if key not in ours),
    )


def _by_setting(rows: Sequence[Row], fixed: Mapping[str, str], freed: set[str]) -> dict[str, Row]:
    """The latest row of each setting and model among those with the fixed factors."""
    found: dict[str, Row] = {}
    for row in rows:
        if all(str(row.setting.get(name)) == value for name, value in fixed.items()):
            rest = {name: value for name, value in row.setting.items() if name not in freed}
            found[json.dumps([rest, row.model], sort_keys=True)] = row
    return found


def _pair(before: Row, after: Row, least: float) -> Pair:
    a, b = before.timing, after.timing
    if a is None or b is None:
        same = before.status is after.status
        return Pair(before, after, Change.SAME if same and before.status is Status.ILLEGAL else None)
    together = _together(before, after)
    if len(together) >= LEAST_ROUNDS:
        ours, theirs = zip(*together, strict=True)
        return Pair(before, after, paired_change(ours, theirs, least))
    return Pair(before, after, change(a, b, least))


def _together(before: Row, after: Row) -> list[tuple[float, float]]:
    """Rounds that were taken in the same visits of one run."""
    if before.timing is None or after.timing is None or before.figures.get(RUN) is None:
        return []
    if before.figures[RUN] != after.figures.get(RUN):
        return []
    ours = dict(zip(before.figures[VISITS], before.timing.rounds, strict=True))
    theirs = dict(zip(after.figures[VISITS], after.timing.rounds, strict=True))
    return [(ours[visit], theirs[visit]) for visit in ours if visit in theirs]
