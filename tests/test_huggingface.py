"""Hugging Face folders compute what transformers computes with them, on one device and on a mesh.

Idea: the folders were written by transformers, with its logits and greedy tokens beside (see
`huggingface_models`). Every family goes through the whole path: config, key table, folding, and the steps
on one device and on 2×2×2 host devices.

Data flow: folder → `open_checkpoint` → `huggingface_runs.run` → against `expected.npz`.

Worked example: `llama_nine_heads` has 9 query heads and 3 kv heads, which 8 chips do not divide.
"""

import functools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.huggingface_folder import find_files, read_named
from checkpoints.state import CheckpointState
from layers.errors import UserError
from tests.extras import NEEDS_SAFETENSORS
from tests.huggingface_models import CASES, EXPECTED, FOLDER, NEW_TOKENS, PROMPT, choose, save
from tests.huggingface_runs import run
from tests.torch_files import write_torch

pytestmark = NEEDS_SAFETENSORS
TOLERANCE = 1e-4


@functools.cache
def state(name: str) -> CheckpointState:
    return open_checkpoint(FOLDER / name).state


def compare(opened: CheckpointState, expected: Path, *, on_mesh: bool) -> None:
    with np.load(expected, allow_pickle=False) as stored:
        ids, logits, greedy = stored["ids"], stored["logits"], stored["greedy"]
    found = run(opened, ids, PROMPT, NEW_TOKENS, on_mesh=on_mesh)
    assert np.max(np.abs(found.logits - logits)) / np.max(np.abs(logits)) < TOLERANCE
    assert found.greedy.tolist() == greedy.tolist()


def test_every_folder_has_a_case() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(CASES)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "2,2,2"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, on_mesh: bool) -> None:
    assert detect(FOLDER / name) is Container.HUGGING_FACE
    compare(state(name), FOLDER / name / EXPECTED, on_mesh=on_mesh)


def torch_folder(name: str, folder: Path, shards: int) -> Path:
    """The folder's weights as `pytorch_model.bin`, or as shards that an index names."""
    arrays = {
        key: np.asarray(array) for key, array in read_named(find_files(FOLDER / name), "").arrays.items()
    }
    folder.mkdir()
    shutil.copy(FOLDER / name / "config.json", folder)
    if shards == 1:
        write_torch(folder / "pytorch_model.bin", arrays)
        return folder
    placed = {key: f"pytorch_model-{at % shards + 1}-of-{shards}.bin" for at, key in enumerate(arrays)}
    for shard in set(placed.values()):
        write_torch(folder / shard, {key: arrays[key] for key in arrays if placed[key] == shard})
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_weights_in_pytorch_files_read_as_those_in_safetensors(
    name: str, shards: int, tmp_path: Path
) -> None:
    found = open_checkpoint(torch_folder(name, tmp_path / "a", shards)).state
    assert found.hparams == state(name).hparams
    assert found.weights.keys() == state(name).weights.keys()
    for key, entry in state(name).weights.items():
        np.testing.assert_array_equal(np.asarray(found.weights[key]), np.asarray(entry))


def test_a_missing_pytorch_shard_is_named(tmp_path: Path) -> None:
    folder = torch_folder("llama", tmp_path / "a", 3)
    (folder / "pytorch_model-2-of-3.bin").unlink()
    with pytest.raises(UserError, match=r"is in pytorch_model-2-of-3.bin, which is missing"):
        open_checkpoint(folder)


def test_a_bare_pickle_as_weights_is_refused_unread(tmp_path: Path) -> None:
    folder = torch_folder("llama", tmp_path / "a", 1)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match=r"a bare pickle, as PyTorch wrote before 1\.6, which is not read"):
        open_checkpoint(folder)


@pytest.mark.oracle_live
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_models_made_now_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model, expected = choose(CASES[name], first_seed=1000)
    save(CASES[name], model, expected, tmp_path / name)
    compare(open_checkpoint(tmp_path / name).state, tmp_path / name / EXPECTED, on_mesh=False)
