"""The check passes on every mesh: of 8 chips and fewer here, of 16 in a process of its own."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from checkpoints.formats import open_checkpoint
from inference_engine.checking.cases import Factors, covering_cases
from inference_engine.checking.run import Checker
from inference_engine.cli.model import default_checkpoint
from layers.hparams import Block, HParams, NormPlacement
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from tests.check_meshes import CORE, GROUPED, rows

REPO = pathlib.Path(__file__).resolve().parent.parent
MULTIQUERY = dataclasses.replace(GROUPED, kv_heads=1, windows=())
SERIAL = dataclasses.replace(GROUPED, block=Block.SERIAL, norm_placement=NormPlacement.TWO)
SMALL = dataclasses.replace(CORE, prefill_layout=CORE.prefill_layout[2:3], weights=("float32",), batch=(3,))


@pytest.mark.parametrize(
    ("mesh", "every"), [("2,2,2", 3), ("4,2,1", 5), ("1,4,2", 5), ("2,1,3", 5), ("1,1,1", 8)]
)
def test_check_passes_on_a_mesh(mesh: str, every: int) -> None:
    found = rows(mesh, every)
    assert len(found) >= 5
    assert all(row.ok for row in found), [row.to_json() for row in found if not row.ok]


@pytest.mark.parametrize("hparams", [MULTIQUERY, SERIAL], ids=["multiquery", "serial"])
def test_check_passes_for_other_models(hparams: HParams) -> None:
    found = rows("2,2,2", 6, hparams, SMALL)
    assert all(row.ok for row in found), [row.to_json() for row in found if not row.ok]


@pytest.mark.parametrize("every", ["9", pytest.param("1", marks=pytest.mark.long)])
def test_check_passes_on_sixteen_chips(every: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.check_meshes", "16", every, "4,4,1", "4,2,2", "2,4,2"],
        cwd=REPO,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["mesh"] for report in found] == ["4,4,1", "4,2,2", "2,4,2"]
    assert not any(report["bad"] for report in found), found


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2,2,2", "4,2,1", "1,4,2", "2,1,3", "1,1,1"])
def test_check_passes_on_a_mesh_in_every_case(mesh: str) -> None:
    found = rows(mesh)
    assert all(row.ok for row in found), [row.to_json() for row in found if not row.ok]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2,2,2", "4,2,1", "1,4,2", "2,1,3", "1,1,1"])
def test_check_passes_for_the_default_checkpoint(mesh: str) -> None:
    shape = MeshShape.parse(mesh)
    checker = Checker(open_checkpoint(default_checkpoint()).state, shape, make_mesh(shape))
    found = [checker.run(case) for case in covering_cases(Factors(), shape)]
    assert all(row.ok for row in found), [row.to_json() for row in found if not row.ok]
