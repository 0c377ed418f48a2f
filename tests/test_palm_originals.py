"""The original PaLM packages' files compute what the packages compute, on one device and on a mesh.

Idea: each folder was written by a package itself, with its logits and greedy tokens beside (see
`palm_originals`), and goes through the whole path: container, key table, folding, and the steps.

Data flow: folder → `open_checkpoint` → `huggingface_runs.run` → against `expected.npz`.

Worked example: `palm_rlhf_0.2.4` read as if its gains were plain misses by more than the tolerance.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.leaves_source import read_leaves
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from tests.huggingface_models import EXPECTED, NEW_TOKENS, PROMPT
from tests.huggingface_runs import run
from tests.palm_originals import CASES, FOLDER, run_original

TOLERANCE = 1e-4
JAX = FOLDER / "palm_jax_0.1.2" / "model.eqx"


def state(name: str, folder: Path, options: ReaderOptions | None = None) -> CheckpointState:
    return open_checkpoint(folder / CASES[name].file, options or CASES[name].options).state


def error(opened: CheckpointState, folder: Path, *, on_mesh: bool) -> tuple[float, bool]:
    """The largest difference of logits over the largest logit, and whether greedy tokens are equal."""
    with np.load(folder / EXPECTED, allow_pickle=False) as stored:
        ids, logits, greedy = stored["ids"], stored["logits"], stored["greedy"]
    found = run(opened, ids, PROMPT, NEW_TOKENS, on_mesh=on_mesh)
    assert len(greedy) == NEW_TOKENS == 32
    return float(
        np.max(np.abs(found.logits - logits)) / np.max(np.abs(logits))
    ), found.greedy.tolist() == greedy.tolist()


def test_every_folder_has_a_case() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(CASES)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "2,2,2"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_the_package(name: str, on_mesh: bool) -> None:
    difference, same = error(state(name, FOLDER / name), FOLDER / name, on_mesh=on_mesh)
    assert difference < TOLERANCE
    assert same


@pytest.mark.parametrize("name", ["palm_rlhf_0.2.1", "palm_rlhf_0.2.4"])
def test_the_other_meaning_of_gains_is_seen(name: str) -> None:
    other = ReaderOptions(1 - (CASES[name].options.gamma_offset or 0))
    difference, _ = error(state(name, FOLDER / name, other), FOLDER / name, on_mesh=False)
    assert difference > 100 * TOLERANCE


@pytest.mark.oracle_live
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_models_made_now_compute_what_the_package_computes(name: str, tmp_path: Path) -> None:
    run_original(name, 1000, tmp_path / name)
    for on_mesh in (False, True):
        difference, same = error(state(name, tmp_path / name), tmp_path / name, on_mesh=on_mesh)
        assert difference < TOLERANCE
        assert same


def test_leaves_read_alike_from_one_file_and_from_an_npz(tmp_path: Path) -> None:
    leaves = [np.asarray(array) for array in read_leaves(JAX).arrays.values()]
    np.savez(tmp_path / "leaves.npz", *leaves)
    assert detect(JAX) is Container.LEAVES
    options = CASES["palm_jax_0.1.2"].options
    ours, theirs = (
        open_checkpoint(JAX, options).state,
        open_checkpoint(tmp_path / "leaves.npz", options).state,
    )
    assert ours.hparams == theirs.hparams
    for key, entry in ours.weights.items():
        np.testing.assert_array_equal(np.asarray(theirs.weights[key]), np.asarray(entry))


def refusal(path: Path, options: ReaderOptions = ReaderOptions(dim_head=8)) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(path, options)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    return line


def test_leaves_are_read_only_once_the_width_of_a_head_is_said() -> None:
    assert "set dim_head to 8 if it is PaLM" in refusal(JAX, ReaderOptions())
    assert "dim_head is 4; allowed: 8" in refusal(JAX, ReaderOptions(dim_head=4))
    assert "palm_lite (ALiBi), unsupported" in refusal(JAX, ReaderOptions(dim_head=16))
    assert "gamma_offset can only be 0" in refusal(JAX, ReaderOptions(1, 8))


def test_the_width_of_a_head_is_refused_where_the_file_says_it() -> None:
    path = FOLDER / "palm_pytorch_0.2.2" / "model.pt"
    assert "already says how wide its heads are; drop dim_head" in refusal(path)
    assert open_checkpoint(path, dataclasses.replace(ReaderOptions(dim_head=8), dim_head=None)) is not None


def test_damaged_leaves_are_refused_in_one_line(tmp_path: Path) -> None:
    whole, path = JAX.read_bytes(), tmp_path / "model.eqx"
    for size in range(8, len(whole), 997):
        path.write_bytes(whole[:size])
        refusal(path)
    leaves = [np.asarray(array) for array in read_leaves(JAX).arrays.values()]

    def saved(arrays: list[np.ndarray]) -> Path:
        with path.open("wb") as stream:
            for array in arrays:
                np.save(stream, array, allow_pickle=array.dtype.hasobject)
        return path

    assert "9 leaves; PaLM-jax has 2 and 4 more a layer" in refusal(saved(leaves[:-1]))
    assert "leaf 1 has dtype object, expected numbers" in refusal(saved([leaves[0], np.array([{}])]))
    assert "layers.1.ff_wo has shape" in refusal(saved([*leaves[:-1], leaves[-1][:-1]]))
    path.write_bytes(whole.replace(b"(72, 32)", b"(7<<9,)", 1))
    refusal(path)
    huge = whole[:128].replace(b"(72, 32), }      ", b"(9999999999999,)}")
    path.write_bytes(huge)
    assert "bytes are left" in refusal(path)
