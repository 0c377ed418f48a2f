"""A plot is made where rows have an answer for it, and says of what."""

from pathlib import Path

import pytest

from inference_engine.profiling.figures import check_plotting, look
from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Step
from layers.collectives.mode import CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape
from tests.sweep_rows import made_row

MESHES = (MeshShape(2, 2, 2), MeshShape(8, 1, 1), MeshShape(4, 2, 1))


def rows() -> list[Row]:
    return [
        made_row(mesh=mesh, layout=layout, attn_all_to_all=setting, batch=batch, collectives=mode, step=step,
                 seconds=1e-3 * (1 + batch / 8 + i))
        for i, mesh in enumerate(MESHES)
        for layout in Layout
        for setting in AttnAllToAll
        for batch in (1, 4, 16)
        for mode in CollectiveMode
        for step in Step
    ]  # fmt: skip


@pytest.mark.plots
def test_a_rich_grid_has_every_plot(tmp_path: Path) -> None:
    from inference_engine.profiling.plots import plot

    made = plot(rows(), tmp_path)
    names = {
        f"{step.value}_{name}.png"
        for step in Step
        for name in ("batch", "mesh_layout", "pareto", "collectives")
    }
    assert {path.name for path in made} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


@pytest.mark.plots
def test_rows_without_an_answer_make_no_plot(tmp_path: Path) -> None:
    from inference_engine.profiling.plots import plot

    assert plot([made_row(), made_row(Status.FAILED)], tmp_path) == []
    made = plot([made_row(batch=b) for b in (1, 2)], tmp_path)
    assert [path.name for path in made] == ["decode_batch.png"]


@pytest.mark.plots
def test_titles_say_model_device_and_what_is_chosen() -> None:
    from inference_engine.profiling.plots import subtitle

    text = subtitle([row for row in rows() if row.setting["step"] == "decode"], ("batch", "attn_all_to_all"))
    assert "tiny" in text
    assert "a CPU, 8 host devices" in text
    assert "context 16" in text
    assert "each point: the fastest of 3 × mesh" in text


def test_series_differ_in_more_than_colour() -> None:
    looks = [look(i) for i in range(8)]
    assert len({(each.marker, each.hatch, str(each.dash)) for each in looks}) == 8


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        check_plotting(tmp_path / "file" / "plots")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"palm-inference\[plots\]"):
        check_plotting(tmp_path)
