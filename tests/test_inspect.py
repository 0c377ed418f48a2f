"""`inspect` says what headers say, reads no weight, and its estimates are near what a load puts on a chip.

Data flow: checkpoint → `run_serving.main(["inspect", …])` → JSON; weights placed on a mesh → bytes a chip.

Worked example: 9 heads in groups of 3 on 2,2,2 are padded to 16 heads and 4 kv heads.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import run_serving
from checkpoints.lazy import Box, LazyArray
from checkpoints.load import LoadOptions, MeshPlacement, WeightsDtype, load_params
from checkpoints.orbax_store import save_checkpoint
from checkpoints.state import CheckpointState, OpenedCheckpoint, state_spec
from checkpoints.synthetic import synthetic_state
from configs.models import palm_540b
from inference_engine.inspection import differences, inspect_checkpoint
from inference_engine.profiling.chips import CHIPS
from layers.hparams import HParams
from layers.layout import Layout
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from tests.extras import NEEDS_SAFETENSORS
from tests.huggingface_models import FOLDER
from tests.test_imports import REPO

DEFAULT = REPO / "checkpoints" / "default"
SIZED = HParams(layers=4, embed=256, ff=1024, heads=9, kv_heads=3, qkv=32, vocab=1000)


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert run_serving.main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_default_checkpoint_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, DEFAULT, "--memory_gib", "0.001")
    assert report["parameters"] == 5_469_840
    assert report["stored"] == {"bfloat16": 10_939_680}
    assert report["differs_from_palm"] == {}
    assert report["tokenizer"]["ids"] == 2048
    assert report["tokenizer"]["chat_template"] is False
    assert [mesh["fits"] for mesh in report["meshes"]] == [False] * 10
    assert report["layouts"] == [layout.value for layout in Layout]
    assert run_serving.main(["inspect", str(DEFAULT)]) == 0
    assert "2,2,2: 1,367,460 of weights" in capsys.readouterr().out


def test_how_many_of_each_chip_it_takes_is_said_where_no_chip_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inspect(capsys, DEFAULT)["fits_from"] == dict.fromkeys(CHIPS, 1)
    assert "fits_from" not in inspect(capsys, DEFAULT, "--memory_gib", "1")
    assert [mesh["fits"] for mesh in inspect(capsys, DEFAULT, "--chip", "v5e")["meshes"]] == [True] * 10
    assert run_serving.main(["inspect", str(DEFAULT)]) == 0
    assert "fits from   1 v4, 1 v5e, 1 v5p," in capsys.readouterr().out


def test_540b_takes_as_many_chips_as_hold_it() -> None:
    weights = {key: unreadable(shape) for key, shape in state_spec(palm_540b()).items()}
    opened = OpenedCheckpoint("here", CheckpointState(palm_540b(), weights))
    counts = inspect_checkpoint(opened, WeightsDtype.INT8, 8, 2048, None)["fits_from"]
    # 545 GB: 32 chips of 17.2 GB hold 550 GB, but its 48 heads are padded to 64 there.
    assert counts["v5e"] == 64
    assert counts["H200"] == 4
    assert 2 * counts["v4"] == counts["v5e"]
    # A TPU7x is two devices, of 96 GiB each.
    assert counts["tpu7x"] == 8


def test_truncated_weights_are_noticed_before_they_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "a", synthetic_state(SIZED))
    inspect(capsys, tmp_path / "a")
    files = [file for file in (tmp_path / "a" / "weights_0").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert run_serving.main(["inspect", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "weights_0: truncated or changed: " in error
    assert error.count("\n") == 1


def test_meshes_that_do_not_divide_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    meshes = inspect(capsys, DEFAULT, "--chips", "7")["meshes"]
    assert not any(mesh["legal"] for mesh in meshes)
    assert "embed=240 does not divide over the 7 chips" in meshes[0]["reason"]


@NEEDS_SAFETENSORS
def test_a_foreign_form_is_said_in_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(capsys, FOLDER / "gemma2")
    assert report["family"] == "Gemma 2"
    said = report["differs_from_palm"]
    assert said["norm_gain_offset"] == 1
    assert said["attn_softcap"] == 4.0
    assert said["windows"] == [4, None]
    assert report["tokenizer"]["problem"] == "none in the checkpoint"


def unreadable(shape: tuple[int, ...]) -> LazyArray:
    def refuse(box: Box) -> np.ndarray:
        raise AssertionError(f"read {box}")

    return LazyArray(shape, np.dtype(np.float32), refuse)


def test_no_weight_is_read() -> None:
    weights = {key: unreadable(shape) for key, shape in state_spec(SIZED).items()}
    opened = OpenedCheckpoint("here", CheckpointState(SIZED, weights))
    report = inspect_checkpoint(opened, WeightsDtype.INT8, 8, 2048, None)
    assert report["meshes"][4]["mesh"] == "2,2,2"
    assert report["meshes"][4]["heads"] == [16, 4]


@pytest.mark.parametrize("weights", list(WeightsDtype))
def test_estimates_are_near_what_a_load_puts_on_a_chip(weights: WeightsDtype) -> None:
    shape = MeshShape(2, 2, 2)
    state = synthetic_state(SIZED)
    placement = MeshPlacement(Layout.WEIGHT_STATIONARY_2D.form.storage, shape, make_mesh(shape))
    params = load_params(state, LoadOptions(weights, placement=placement))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    meshes = inspect_checkpoint(OpenedCheckpoint("here", state), weights, 8, 1, None)["meshes"]
    said = next(mesh["weight_bytes_a_chip"] for mesh in meshes if mesh["mesh"] == "2,2,2")
    assert abs(said - held) < 0.1 * held


BAD = {
    "path": (["nowhere"], "nowhere: no such file or folder"),
    "no path": ([], "no PATH; usage: inspect PATH [flags]"),
    "chips": ([DEFAULT, "--chips", "0"], "--chips=0 is out of range; allowed: 1 to 1024"),
    "chip": (
        [DEFAULT, "--chip", "v5"],
        "--chip=v5 is not known; allowed: v4, v5e, v5p, v6e, tpu7x, H100, H200",
    ),
    "two chips": ([DEFAULT, "--chip", "v5e", "--memory_gib", "3"], "allowed: one of them"),
    "width": ([DEFAULT, "--dim_head", "0"], "--dim_head=0 is not allowed; allowed: 1 and above; nearest: 1"),
    "memory": ([DEFAULT, "--memory_gib", "-1"], "--memory_gib=-1.0 is no size; allowed: above 0"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_words_are_refused(words: list, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_serving.main(["inspect", *map(str, words)]) == 2
    assert message in capsys.readouterr().err


def test_palm_differs_from_palm_in_nothing() -> None:
    assert differences(SIZED) == {}
