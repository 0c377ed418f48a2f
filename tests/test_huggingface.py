"""Hugging Face folders compute what transformers computes with them, on one device and on a mesh.

Idea: the folders were written by transformers, with its logits and greedy tokens beside (see
`huggingface_models`). Every family goes through the whole path: config, key table, folding, and the steps
on one device and on 2×2×2 host devices.

Data flow: folder → `open_checkpoint` → `huggingface_runs.run` → against `expected.npz`.

Worked example: `llama_nine_heads` has 9 query heads and 3 kv heads, which 8 chips do not divide.
"""

import functools
from pathlib import Path

import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.state import CheckpointState
from tests.extras import NEEDS_SAFETENSORS
from tests.huggingface_models import CASES, EXPECTED, FOLDER, NEW_TOKENS, PROMPT, choose, save
from tests.huggingface_runs import run

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


@pytest.mark.oracle_live
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_models_made_now_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model, expected = choose(CASES[name], first_seed=1000)
    save(CASES[name], model, expected, tmp_path / name)
    compare(open_checkpoint(tmp_path / name).state, tmp_path / name / EXPECTED, on_mesh=False)
