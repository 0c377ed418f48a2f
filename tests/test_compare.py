"""What two sets of rows say of each other: matched by setting, by rounds where they were timed in turn."""

import dataclasses

import pytest

from benchmarks.repeatability import differing, holds, within
from inference_engine.profiling.compare import LEAST, RUN, VISITS, compare
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.spread import Change, Timing
from layers.collectives.mode import CollectiveMode
from tests.sweep_rows import made_row


def timed(row: Row, rounds: list[float], run: str = "", first: int = 0) -> Row:
    """With rounds of the visits of a run from `first` onwards."""
    visits = list(range(first, first + len(rounds)))
    figures = row.figures | ({RUN: run, VISITS: visits} if run else {})
    return dataclasses.replace(row, timing=Timing.of(rounds), figures=figures)


DRIFT = [1.0, 5.0, 2.0, 9.0, 1.5, 4.0, 3.0]


def test_rounds_taken_side_by_side_are_compared_in_pairs() -> None:
    slower = [1.1 * value for value in DRIFT]
    a, b = timed(made_row(), DRIFT, "r1"), timed(made_row(), slower, "r1")
    assert compare([a], [b]).pairs[0].change is Change.SLOWER
    apart = timed(made_row(), slower, "r2")
    assert compare([a], [apart]).pairs[0].change is Change.SAME
    unknown = timed(made_row(), slower)
    assert compare([timed(made_row(), DRIFT)], [unknown]).pairs[0].change is Change.SAME


def test_only_rounds_of_the_same_visits_are_pairs() -> None:
    longer = [*DRIFT, 2.5, 7.0]
    a = timed(made_row(), longer, "r1")
    b = timed(made_row(), [1.1 * value for value in longer[2:]], "r1", first=2)
    assert compare([a], [b]).pairs[0].change is Change.SLOWER
    few = timed(made_row(), [1.1 * value for value in longer[3:]], "r1", first=3)
    assert compare([a], [few]).pairs[0].change is Change.SAME  # 6 pairs are too few


def test_the_latest_row_of_a_setting_counts() -> None:
    rows = [made_row(seconds=9.0), made_row(seconds=1.0)]
    (pair,) = compare(rows, [made_row(seconds=1.0)]).pairs
    assert pair.ratio == pytest.approx(1.0)
    assert pair.change is Change.SAME


def test_rows_of_another_model_are_never_matched() -> None:
    other = dataclasses.replace(made_row(), model={"name": "large", "parameters": 10**9})
    found = compare([made_row()], [other])
    assert found.pairs == ()
    assert len(found.only_before) == len(found.only_after) == 1
    assert found.ratio is None


def test_other_rounds_of_the_same_setting_are_matched() -> None:
    other = dataclasses.replace(made_row(), method={"rounds": 21, "steps": 4})
    assert other.config != made_row().config
    assert len(compare([made_row()], [other]).pairs) == 1


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (Status.ILLEGAL, Status.ILLEGAL, Change.SAME),
        (Status.FAILED, Status.FAILED, None),
        (Status.OK, Status.FAILED, None),
        (Status.ILLEGAL, Status.OK, None),
    ],
)
def test_what_was_not_measured_has_no_verdict(before: Status, after: Status, change: Change | None) -> None:
    (pair,) = compare([made_row(before)], [made_row(after)]).pairs
    assert pair.change is change
    assert pair.ratio is None
    assert pair.to_json()["change"] == (None if change is None else change.value)


def test_small_differences_are_not_named_however_certain() -> None:
    a, b = (
        timed(made_row(), [1.0 + i * 1e-6 for i in range(7)]),
        timed(made_row(), [1.02 + i * 1e-6 for i in range(7)]),
    )
    assert compare([a], [b], LEAST).pairs[0].change is Change.SAME
    assert compare([a], [b], 0.01).pairs[0].change is Change.SLOWER


def test_two_settings_leave_what_has_no_counterpart() -> None:
    modes = (CollectiveMode.REFERENCE, CollectiveMode.LATENCY)
    rows = [made_row(batch=b, collectives=mode) for b in (1, 2) for mode in modes]
    rows.append(made_row(batch=4))
    left, right = ({"collectives": mode.value} for mode in modes)
    found = compare(rows, rows, left=left, right=right)
    assert sorted(pair.before.setting["batch"] for pair in found.pairs) == [1, 2]
    assert {pair.after.setting["collectives"] for pair in found.pairs} == {"latency"}
    assert [row.setting["batch"] for row in found.only_before] == [4]
    assert found.only_after == ()


def test_the_median_ratio_shows_another_machine() -> None:
    before = [made_row(batch=b) for b in (1, 2, 4)]
    after = [made_row(batch=b, seconds=2e-3) for b in (1, 2, 4)]
    found = compare(before, after)
    assert found.ratio == pytest.approx(2.0)
    assert found.count(Change.SLOWER) == 3


def test_tries_are_counted_against_the_one_before() -> None:
    steady = [made_row(batch=1), made_row(batch=2)]
    moved = [made_row(batch=1), made_row(batch=2, seconds=9.0)]
    assert holds(steady[0], steady[0])
    assert not holds(steady[1], moved[1])
    assert within([steady, steady, moved]) == (3, 4)
    assert differing([steady, steady, moved]) == (1, 4)
