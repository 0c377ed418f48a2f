"""Laws of a sweep's loop: every cell gets one row, whatever becomes of it, and the order is one of chance."""

import dataclasses
from collections.abc import Callable

import pytest

from checkpoints.synthetic import synthetic_state
from inference_engine.profiling import sweep as sweep_module
from inference_engine.profiling.bounds import Work
from inference_engine.profiling.chips import ChipSpec
from inference_engine.profiling.measure import Subject, Weights
from inference_engine.profiling.place import Place
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Grid, Method, Setting
from inference_engine.profiling.sweep import Sweep
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape
from tests.sweep_rows import SETTING, VERSIONS
from tests.tiny_checkpoint import TINY

CHIP = ChipSpec("c", {"float32": 1e9}, memory_speed=1e9)
GRID = Grid(mesh=(MeshShape(2, 2, 2),), batch=(1, 2, 3))


class FakePrepare:
    """Prepares cells that take a second, some of which are refused or break."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.breaks: dict[int, Exception] = {}  # by batch, when prepared
        self.stops: dict[int, Exception] = {}  # by batch, when run

    def __call__(self, weights: Weights, setting: Setting, method: Method) -> Subject:
        if setting.batch in self.breaks:
            raise self.breaks[setting.batch]

        def run() -> float:
            self.calls.append(setting.batch)
            if setting.batch in self.stops:
                raise self.stops[setting.batch]
            return 1.0

        return Subject(setting, None, run, setting.batch, Work(8e6, 1e6), 10, 20, 0.5, 0.0)


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> FakePrepare:
    fake = FakePrepare()
    monkeypatch.setattr(sweep_module, "prepare", fake)
    return fake


def run(settings: list[Setting], block: int = 4, check: Callable[[Setting], None] | None = None) -> list[Row]:
    place = Place("cpu", "a CPU", 8, CHIP, VERSIONS)
    made = Sweep(Weights(synthetic_state(TINY)), {"name": "tiny"}, place, Method(), block=block)
    if check is not None:
        made.check = check
    rows: list[Row] = []
    made.run(settings, rows.append)
    return rows


def batches(*values: int) -> list[Setting]:
    return [dataclasses.replace(SETTING, batch=value) for value in values]


def test_cells_of_a_block_are_timed_in_turn(prepare: FakePrepare) -> None:
    rows = run(batches(1, 2, 3), block=2)
    assert [row.setting["batch"] for row in rows] == [1, 2, 3]
    first, alone = prepare.calls[:16], prepare.calls[16:]  # one round more, to warm up
    assert all(set(first[i : i + 2]) == {1, 2} for i in range(0, 16, 2))
    assert len({tuple(first[i : i + 2]) for i in range(0, 16, 2)}) == 2  # not always in the same order
    assert alone == [3] * 8
    assert all(row.timing is not None and len(row.timing.rounds) == 7 for row in rows)


def test_what_is_refused_or_breaks_is_a_row_and_stops_nothing(prepare: FakePrepare) -> None:
    prepare.breaks = {1: UserError("embed=5 does\nnot divide"), 2: RuntimeError("Mosaic failed")}
    prepare.stops = {3: ValueError("")}
    rows = {row.setting["batch"]: row for row in run(batches(1, 2, 3, 4))}
    assert (rows[1].status, rows[1].reason) == (Status.ILLEGAL, "embed=5 does not divide")
    assert (rows[2].status, rows[2].reason) == (Status.FAILED, "RuntimeError: Mosaic failed")
    assert (rows[3].status, rows[3].reason) == (Status.FAILED, "ValueError: ValueError")
    assert rows[4].status is Status.OK
    assert all(row.timing is None and not row.figures for row in rows.values() if row.status is not Status.OK)


def test_a_cell_without_room_beside_others_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    class Full(FakePrepare):
        def __call__(self, weights: Weights, setting: Setting, method: Method) -> Subject:
            tried.append(setting.batch)
            if setting.batch == 2 and tried.count(2) == 1:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return super().__call__(weights, setting, method)

    monkeypatch.setattr(sweep_module, "prepare", Full())
    rows = run(batches(1, 2, 3))
    assert [(row.setting["batch"], row.status) for row in rows] == [(b, Status.OK) for b in (1, 2, 3)]
    assert tried == [1, 2, 2, 3]


def test_a_check_refuses_before_anything_is_prepared(prepare: FakePrepare) -> None:
    def refuse(setting: Setting) -> None:
        raise UserError("does not fit")

    (row,) = run(batches(1), check=refuse)
    assert (row.status, row.reason, prepare.calls) == (Status.ILLEGAL, "does not fit", [])


def test_figures_follow_from_the_time(prepare: FakePrepare) -> None:
    (row,) = run(batches(4))
    figures = row.figures
    assert figures["tokens_per_second"] == 4.0
    assert figures["ms_per_token"] == 1000.0
    assert figures["chip_seconds_per_token"] == 2.0
    # eight host devices share the machine: each reads an eighth of 1e9 bytes/s
    assert figures["memory_share"] == pytest.approx(8 * 1e6 / 1e9)
    assert figures["flops_share"] == pytest.approx(8 * 8e6 / 1e9)


def test_cells_are_all_combinations_once_in_an_order_of_chance() -> None:
    cells = GRID.cells(1)
    assert len(cells) == len(set(cells)) == len(Layout) * len(AttnAllToAll) * 3
    assert cells == GRID.cells(1) != GRID.cells(2)
    assert set(cells) == set(GRID.cells(2))
    twice = dataclasses.replace(GRID, batch=(1, 2, 3, 1))
    assert set(twice.cells()) == set(cells)


def test_a_grid_without_cells_is_refused() -> None:
    with pytest.raises(UserError, match="no cells: batch has no value"):
        dataclasses.replace(GRID, batch=()).cells()


def test_a_value_of_another_type_than_its_factor_is_refused() -> None:
    made = Grid(mesh=(MeshShape(),))
    object.__setattr__(made, "mesh", ("2,2,2",))  # as a module that nobody type-checks may do
    with pytest.raises(
        UserError, match="mesh='2,2,2' of the grid is not allowed; allowed: values of MeshShape"
    ):
        made.check({})
