"""Laws of the command `sweep`: what it measures, what it leaves behind, and how it ends."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run_serving
from configs.sweeps import GRIDS
from inference_engine.cli.flags import parse
from inference_engine.cli.grid_flags import grid_of
from inference_engine.cli.registries import Registries
from inference_engine.cli.sweep_command import sweep_command
from inference_engine.cli.sweep_plan import sweep_plan
from inference_engine.cli.sweep_table import WIDTH, table
from inference_engine.config import EngineConfig
from inference_engine.profiling import place, sweep
from inference_engine.profiling.chips import ChipSpec
from inference_engine.profiling.rows import Status
from inference_engine.profiling.settings import Grid, Step
from inference_engine.profiling.store import read_rows
from inference_engine.sampling_params import SamplingParams
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape, legal_shapes
from tests.cli_runs import Run
from tests.sweep_rows import made_row
from tests.test_imports import REPO
from tests.tiny_checkpoint import save_tiny

CHIP = ChipSpec("c", {"float32": 1e9}, memory_speed=1e9)
SMALL = ("--layout", "2d", "--batch", "2", "--context", "16", "--steps", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def run(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Runner":
    monkeypatch.setattr(place, "this_cpu", lambda name: CHIP)
    monkeypatch.setattr(sweep, "PAUSE_SECONDS", 0.0)
    return Runner(tiny, capsys)


class Runner:
    """Runs `sweep` on the tiny checkpoint."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    def __call__(self, *words: str) -> Run:
        code = run_serving.main(["sweep", "--checkpoint", str(self.path), *SMALL, *words])
        return Run(code, *self.capsys.readouterr())


def grid(*words: str) -> Grid:
    registries = Registries({}, EngineConfig(), SamplingParams(), "", GRIDS)
    flags = parse(sweep_command(registries), words)
    assert flags is not None
    return grid_of(flags, GRIDS)


def test_lists_become_a_grid() -> None:
    made = grid("--mesh", "2,2,2", "--mesh", "6", "--layout", "all", "--batch", "1, 8", "--step", "prefill")
    assert made.mesh == (MeshShape(2, 2, 2), *legal_shapes(6))
    assert made.layout == tuple(Layout)
    assert (made.batch, made.step) == ((1, 8), (Step.PREFILL,))
    assert made.attn_all_to_all == tuple(AttnAllToAll)


def test_flags_exchange_factors_of_a_named_grid() -> None:
    for text in ("collectives", "configs.sweeps:collectives"):
        assert grid("--grid", text) == GRIDS["collectives"]()
    made = grid("--grid", "collectives", "--batch", "3")
    assert (made.batch, made.collectives) == ((3,), GRIDS["collectives"]().collectives)


@pytest.mark.parametrize("name", GRIDS)
def test_every_grid_of_the_project_has_cells(name: str) -> None:
    assert 4 <= len(GRIDS[name]().cells()) <= 400


def test_a_grid_of_a_module_of_the_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_grids.py").write_text(
        "from inference_engine.profiling.settings import Grid\n"
        "from layers.mesh_shape import MeshShape\n"
        "def good(): return Grid(mesh=(MeshShape(1, 1, 1),), weights=('int8',))\n"
        "def none(): return Grid(mesh=())\n"
        "def odd(): return Grid(mesh=(MeshShape(1, 1, 1),), weights=('int3',))\n"
        "def zero(): return Grid(mesh=(MeshShape(1, 1, 1),), batch=(0,))\n"
        "def broken(): return 1 / 0\n"
        "def other(): return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert grid("--grid", "my_grids:good").weights == ("int8",)
    refused = {
        "none": "mesh has no value", "odd": "weights='int3' of the grid is not allowed; allowed: float32",
        "zero": "batch=0 of the grid", "broken": "ZeroDivisionError",
        "other": "returns int", "gone": "has no attribute 'gone'",
    }  # fmt: skip
    for name, found in refused.items():
        with pytest.raises(UserError, match=found):
            grid("--grid", f"my_grids:{name}")
    with pytest.raises(UserError, match="ModuleNotFoundError"):
        grid("--grid", "no_such_module:x")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--grid", "al_to_all"), "allowed: all_to_all, .*nearest: all_to_all"),
        (("--layout", "2d,3d"), "--layout=3d is not known; allowed: 1d, 2d"),
        (("--weights", "fp32"), "nearest: float32"),
        (("--batch", "0"), "--batch=0 is not a list of integers from 1"),
        (("--batch", "1,,2"), "--batch= is not"),
        (("--context", "x"), "--context=x is not"),
        (("--mesh", "2,2"), "mesh '2,2' is not three"),
        (("--mesh", "99999999"), "allowed: 1 to 16384"),
        (("--layout", ""), "--layout= is not known"),
        (("--rounds", "3"), "--rounds=3 is not allowed; allowed: 7 and above"),
        (("--steps", "0"), "--steps=0"),
        (("--model", "palm_8"), "nearest: palm_8b"),
        (("--out", ""), "--out is empty"),
    ],
)
def test_bad_flags_are_refused_before_jax_starts(
    words: tuple[str, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_serving.main(["sweep", *words])
    run = Run(code, *capsys.readouterr())
    assert re.search(found, run.error), run.error


def test_a_sweep_measures_once_and_says_why_it_cannot(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    words = (
        "--mesh",
        "2,2,2",
        "--mesh",
        "5,1,1",
        "--attn_all_to_all",
        "yzx",
        "--step",
        "all",
        "--out",
        str(out),
    )
    first = run(*words, "--json")
    assert first.code == 0, [row["reason"] for row in first.rows]
    rows = {(row["setting"]["mesh"], row["setting"]["step"]): row for row in first.rows}
    assert len(rows) == len(first.rows) == 4
    for step in ("decode", "prefill"):
        assert rows["2,2,2", step]["status"] == "ok"
        assert rows["2,2,2", step]["timing"]["n"] >= 7
        assert rows["2,2,2", step]["figures"]["memory_share"] > 0
        assert "embed=48 does not divide over the 5 chips" in rows["5,1,1", step]["reason"]
    tokens = rows["2,2,2", "prefill"]["figures"]["tokens_per_second"]
    assert tokens == pytest.approx(2 * 16 / rows["2,2,2", "prefill"]["timing"]["median"])
    before = out.read_bytes()
    again = run(*words)
    assert (again.code, out.read_bytes()) == (0, before)
    assert "4 of 4 cells: 2 ok, 2 illegal; 0 measured now" in again.err
    assert again.out.count("illegal: ") == 2
    half = before[: before.rindex(b'"setting"')]
    out.write_bytes(half)
    resumed = run(*words)
    assert "repaired: " in resumed.err
    assert "1 measured now" in resumed.err
    assert len(read_rows(out)) == 4


def test_a_failed_cell_sets_the_exit_code_and_is_run_again_when_asked(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no program")

    monkeypatch.setattr(sweep, "prepare", fail)
    words = ("--attn_all_to_all", "none,z", "--out", str(tmp_path / "r.jsonl"))
    for more, count in (((), 2), ((), 0), (("--retry_failed",), 2)):
        failed = run(*words, *more)
        assert failed.code == 1
        assert failed.out.count("RuntimeError: no program") == 2
        assert f"2 of 2 cells: 2 failed; {count} measured now" in failed.err
    assert [row.status for row in read_rows(tmp_path / "r.jsonl")] == [Status.FAILED] * 4


def test_a_mesh_beyond_the_devices_is_a_row_and_nothing_to_measure_an_error(
    run: Runner, tmp_path: Path
) -> None:
    out = tmp_path / "r.jsonl"
    refused = run("--mesh", "100,1,1", "--attn_all_to_all", "none", "--out", str(out))
    assert refused.code == 2
    assert refused.err.startswith(
        "error: none of the 1 cells can run; the first: mesh 100,1,1 has 100 chips and"
    )
    assert [row.status for row in read_rows(out)] == [Status.ILLEGAL]


def test_a_foreign_results_file_ends_the_sweep_before_it_begins(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    refused = run("--out", str(out))
    assert (refused.code, out.read_text()) == (2, "my notes\n")
    assert "line 1 is not a row of a sweep; nothing was changed" in refused.err


def test_a_file_that_is_only_read_is_not_said_to_be_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    assert run_serving.main(["sweep", "compare", str(out), str(out)]) == 2
    error = capsys.readouterr().err
    assert "line 1 is not a row of a sweep\n" in error


def test_the_table_fits_its_width() -> None:
    rows = [made_row(batch=batch) for batch in (1, 1024)]
    assert max(map(len, table(rows).splitlines())) <= WIDTH


def test_an_interrupt_keeps_what_is_done(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    words = [
        sys.executable, str(REPO / "run_serving.py"), "sweep", "--checkpoint", str(tiny), *SMALL,
        "--mesh", "5,1,1", "--mesh", "2,2,2", "--held", "1", "--step", "all", "--out", str(out), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < 2):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    shown, err = process.communicate(timeout=60)
    assert process.returncode == 130
    rows = read_rows(out)
    assert [json.loads(line)["config"] for line in shown.splitlines()] == [row.config for row in rows]
    assert f"interrupted: {len(rows)} of 16 cells" in err.decode()


def test_host_devices_are_not_made_for_meshes_beyond_any_machine() -> None:
    registries = Registries({}, EngineConfig(), SamplingParams(), "", GRIDS)
    flags = parse(sweep_command(registries), ("--mesh", "2,1,3", "--mesh", "100,100,100"))
    assert flags is not None
    assert sweep_plan(flags, registries).host_devices == 6


def test_a_full_disk_ends_the_sweep_and_keeps_its_rows(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, written = tmp_path / "r.jsonl", os.write, []

    def full(descriptor: int, data: bytes) -> int:
        if data.startswith(b'{"schema"'):
            written.append(data)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    stopped = run("--mesh", "5,1,1", "--out", str(out))
    assert stopped.code == 1
    assert f"error: {out} cannot be written (No space left on device); 2 rows in it are whole" in stopped.err
    assert stopped.out.count("illegal: ") == len(read_rows(out)) == 2
    monkeypatch.undo()


def test_the_help_names_the_grids_and_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_serving.main(["sweep", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join(GRIDS) in text
    assert all(layout.value in text for layout in Layout)
    assert run_serving.main(["sweep", "compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: run_serving.py sweep compare BEFORE.jsonl AFTER.jsonl [flags]")


def test_a_word_that_is_no_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_serving.main(["sweep", "comparison"])
    assert "unexpected 'comparison'; it belongs to no flag" in Run(code, *capsys.readouterr()).error
