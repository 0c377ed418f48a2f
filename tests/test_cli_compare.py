"""Laws of `sweep compare`: what is the same is no difference, and what changed is named with its size."""

import dataclasses
from pathlib import Path

import pytest

import run_serving
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.store import Store
from layers.layout import Layout
from tests.cli_runs import Run
from tests.sweep_rows import made_row


class Runner:
    """Writes two files and compares them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, before: list[Row], after: list[Row], *words: str) -> Run:
        paths = [self.folder / name for name in ("a.jsonl", "b.jsonl")]
        for path, rows in zip(paths, (before, after), strict=True):
            path.unlink(missing_ok=True)
            with Store.open(path) as store:
                for row in rows:
                    store.add(row)
        code = run_serving.main(["sweep", "compare", *map(str, paths), *words])
        return Run(code, *self.capsys.readouterr())


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(tmp_path, capsys)


def test_a_file_against_itself_is_no_difference(compare: Runner) -> None:
    rows = [made_row(batch=b, seconds=1e-3 * b) for b in (1, 2, 4)] + [made_row(Status.ILLEGAL, batch=8)]
    run = compare(rows, rows)
    assert (run.code, run.out) == (0, "no difference\n")
    assert "4 settings in both: 4 no difference, 0 faster, 0 slower; median of all ratios 1.000" in run.err


def test_changes_are_named_the_largest_first(compare: Runner) -> None:
    before = [made_row(batch=b) for b in (1, 2, 4, 8)]
    after = [made_row(batch=b, seconds=s) for b, s in ((1, 1.2e-3), (2, 1.01e-3), (4, 0.5e-3), (16, 1.0))]
    (value,) = compare(before, after, "--json").rows
    changes = [(pair["setting"]["batch"], pair["change"]) for pair in value["pairs"]]
    assert changes == [(4, "faster"), (1, "slower"), (2, "no difference")]
    assert value["pairs"][0]["ratio"] == pytest.approx(0.5)
    assert [row["batch"] for row in value["only_before"]] == [8]
    assert [row["batch"] for row in value["only_after"]] == [16]
    shown = compare(before, after).out.splitlines()
    assert len(shown) == 3
    assert "faster" in shown[1]
    assert "slower" in shown[2]
    assert len(compare(before, after, "--all").out.splitlines()) == 4


def test_two_settings_are_matched_by_everything_else(compare: Runner) -> None:
    rows = [
        made_row(batch=b, layout=layout, seconds=s)
        for b in (1, 2)
        for layout, s in ((Layout.WEIGHT_STATIONARY_1D, 2e-3), (Layout.WEIGHT_STATIONARY_2D, 1e-3))
    ]
    (value,) = compare(rows, rows, "--before", "layout=1d", "--after", "layout=2d", "--json").rows
    assert [pair["change"] for pair in value["pairs"]] == ["faster", "faster"]
    (value,) = compare(rows, rows, "--before", "layout=2d", "--after", "layout=2d", "--json").rows
    assert [pair["change"] for pair in value["pairs"]] == ["no difference"] * 2


def test_a_cell_that_stopped_working_is_shown(compare: Runner) -> None:
    run = compare([made_row()], [made_row(Status.FAILED, reason="x")])
    assert "failed" in run.out
    assert run.code == 0


def test_other_devices_are_a_caution(compare: Runner) -> None:
    other = made_row()
    other = dataclasses.replace(other, device={**other.device, "kind": "another CPU"})
    assert "caution: devices differ: a CPU and another CPU" in compare([made_row()], [other]).err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--before", "layuot=1d"), "nearest: layout"),
        (("--before", "layout=3d"), "no row has it; allowed: 2d"),
        (("--after", "layout"), "is no factor and its value"),
        (("--at_least", "-1"), "--at_least=-1.0 is not allowed"),
    ],
)
def test_bad_factors_are_refused(compare: Runner, words: tuple[str, ...], found: str) -> None:
    assert found in compare([made_row()], [made_row()], *words).error


def test_files_without_a_common_setting_are_refused(compare: Runner) -> None:
    assert "no setting is in both" in compare([made_row(batch=1)], [made_row(batch=2)]).error
    assert "holds no row" in compare([], []).error


def test_both_files_have_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, found in (
        (["a"], "no AFTER.jsonl; usage: sweep compare BEFORE.jsonl AFTER.jsonl"),
        (["a", "b", "c"], "unexpected 'c'"),
    ):
        code = run_serving.main(["sweep", "compare", *words])
        assert found in Run(code, *capsys.readouterr()).error
