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
    monkeypatch.setattr(sweep_module, "PAUSE_SECONDS", 0.0)
    return fake


def run(settings: list[Setting], held: int = 8, check: Callable[[Setting], None] | None = None) -> list[Row]:
    place = Place("cpu", "a CPU", 8, CHIP, VERSIONS)
    made = Sweep(Weights(synthetic_state(TINY)), {"name": "tiny"}, place, Method(), held=held)
    if check is not None:
        made.check = check
    rows: list[Row] = []
    made.run(settings, rows.append)
    return rows


def batches(*values: int) -> list[Setting]:
    return [dataclasses.replace(SETTING, batch=value) for value in values]


def test_every_compilation_is_followed_by_a_round_of_each_cell_that_is_ready(prepare: FakePrepare) -> None:
    rows = run(batches(*range(1, 11)), held=8)
    assert [row.setting["batch"] for row in rows] == list(range(1, 11))
    # 7 rounds for the early cells: 1 leaves in the visit in which 7 is prepared, and so on
    first = [row.figures["visits"][0] for row in rows]
    assert first == list(range(10))
    early = rows[0]
    assert early.figures["visits"] == list(range(7))
    # the last ones stay until the youngest has its rounds
    assert {row.figures["visits"][-1] for row in rows[4:]} == {15}
    assert all(row.timing is not None and len(row.timing.rounds) >= 7 for row in rows)
    # a cold round does not count: in ten visits something was prepared
    assert prepare.calls.count(1) == 14
    assert prepare.calls.count(10) == 1 + 7


def test_the_order_within_a_visit_is_one_of_chance(prepare: FakePrepare) -> None:
    run(batches(1, 2))
    warm = prepare.calls[6:]
    assert len({tuple(warm[i : i + 2]) for i in range(0, len(warm), 2)}) == 2


def test_progress_counts_cells_that_are_begun(prepare: FakePrepare) -> None:
    prepare.breaks = {2: UserError("no")}
    begun: list[int] = []
    made = Sweep(Weights(synthetic_state(TINY)), {}, Place("cpu", "a CPU", 8, CHIP, VERSIONS), held=2)
    made.run(batches(1, 2, 3, 4), lambda row: None, begun.append)
    assert begun[:2] == [1, 3]
    assert begun == sorted(begun)
    assert begun[-1] == 4


def test_one_cell_at_a_time_is_timed_alone(prepare: FakePrepare) -> None:
    rows = run(batches(1, 2), held=1)
    assert prepare.calls == [1] * 8 + [2] * 8
    assert [row.figures["visits"] for row in rows] == [list(range(7)), list(range(7, 14))]


def test_what_is_refused_or_breaks_is_a_row_and_stops_nothing(prepare: FakePrepare) -> None:
    prepare.breaks = {1: UserError("embed=5 does\nnot divide"), 2: RuntimeError("Mosaic failed")}
    prepare.stops = {3: ValueError("")}
    rows = {row.setting["batch"]: row for row in run(batches(1, 2, 3, 4))}
    assert (rows[1].status, rows[1].reason) == (Status.ILLEGAL, "embed=5 does not divide")
    assert (rows[2].status, rows[2].reason) == (Status.FAILED, "RuntimeError: Mosaic failed")
    assert (rows[3].status, rows[3].reason) == (Status.FAILED, "ValueError: ValueError")
    assert rows[4].status is Status.OK
    assert all(row.timing is None and not row.figures for row in rows.values() if row.status is not Status.OK)


def test_a_cell_without_room_beside_others_waits_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class OneAtATime(FakePrepare):
        """Has no room for a second cell until the first has had all its rounds."""

        def __call__(self, weights: Weights, setting: Setting, method: Method) -> Subject:
            tried.append(setting.batch)
            before = self.calls.count(setting.batch - 1)
            if setting.batch > 1 and before < 1 + method.rounds:
                raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return super().__call__(weights, setting, method)

    monkeypatch.setattr(sweep_module, "prepare", OneAtATime())
    monkeypatch.setattr(sweep_module, "PAUSE_SECONDS", 0.0)
    rows = run(batches(1, 2, 3))
    assert [(row.setting["batch"], row.status) for row in rows] == [(b, Status.OK) for b in (1, 2, 3)]
    assert tried == [1, 2, 2, 3]  # once it is known that there is room for one, no second is tried beside it


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
