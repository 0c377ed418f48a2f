"""Damaged checkpoints of every format give one line or right arrays, quickly and without memory.

Idea: a small good checkpoint of each format is copied and damaged in one place a case: cut at any byte, a
byte flipped, a run of bytes overwritten, a value of its JSON exchanged. Whatever happens, the outcome is a
UserError of one line that names the checkpoint, or arrays of the shapes that the form has. Any other
exception, a case that takes seconds, or memory for what a header merely claims fails the test.

Data flow: format → good copy → `mutations` → `open_checkpoint` and every array → outcome.

Worked example: 9 files × 60 cases; a flip in a safetensors file's data is harmless, one in its header is not.
"""

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.formats import open_checkpoint
from checkpoints.npz_source import read_npz
from checkpoints.orbax_store import save_checkpoint
from checkpoints.readers.options import ReaderOptions
from checkpoints.safetensors_source import read_safetensors
from checkpoints.state import QuantizedTensor
from checkpoints.synthetic import synthetic_state
from inference_engine.tokenizer_files import open_tokenizer
from layers.errors import UserError
from layers.hparams import HParams
from tests.extras import NEEDS_GGUF, NEEDS_SAFETENSORS, NEEDS_TOKENIZERS
from tests.huggingface_models import FOLDER
from tests.torch_files import write_torch

CASES = 60
SINGLE = "model.safetensors"
SECONDS, MEMORY = 5.0, 64 << 20
SMALL = HParams(layers=1, embed=8, ff=16, heads=2, kv_heads=1, qkv=4, vocab=16)


def palm_pytorch_arrays() -> dict[str, np.ndarray]:
    """PaLM-pytorch's tensors, small."""
    rng = np.random.default_rng(0)
    shapes = {
        "0.weight": (8, 4), "1.fn.norm.gamma": (4,), "1.fn.rotary_emb.inv_freq": (1,),
        "1.fn.fused_attn_ff_proj.weight": (20, 4), "1.fn.attn_out.weight": (4, 4),
        "1.fn.ff_out.1.weight": (4, 6), "2.gamma": (4,),
    }  # fmt: skip
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def make_npz(folder: Path) -> Path:
    tensors = {f"w::{key}": array for key, array in palm_pytorch_arrays().items()}
    np.savez(folder / "a.npz", meta=json.dumps({"eps": 1e-5}), **tensors)
    return folder / "a.npz"


def make_torch(folder: Path) -> Path:
    return write_torch(folder / "a.pt", palm_pytorch_arrays())


def make_leaves(folder: Path) -> Path:
    """PaLM-jax's leaves, small."""
    rng = np.random.default_rng(0)
    with (folder / "a.eqx").open("wb") as stream:
        for shape in ((8, 4), (4,), (4,), (4, 20), (4, 4), (6, 4)):
            np.save(stream, rng.normal(size=shape).astype(np.float32))
    return folder / "a.eqx"


def make_torch_folder(folder: Path) -> Path:
    shutil.copytree(FOLDER / "qwen2", folder / "a")
    arrays = {name: np.asarray(array) for name, array in read_safetensors(folder / "a" / SINGLE).items()}
    (folder / "a" / SINGLE).unlink()
    write_torch(folder / "a" / "pytorch_model.bin", arrays)
    return folder / "a"


def make_orbax(folder: Path) -> Path:
    save_checkpoint(folder / "a", synthetic_state(SMALL))
    return folder / "a"


def make_hugging_face(folder: Path) -> Path:
    shutil.copytree(FOLDER / "llama", folder / "a")
    return folder / "a"


def make_single(folder: Path) -> Path:
    shutil.copytree(FOLDER / "qwen2", folder / "a")
    return folder / "a"


def make_gguf(folder: Path) -> Path:
    from tests.gguf_files import llama_metadata, llama_tensors, write_gguf

    return write_gguf(
        folder / "a.gguf", llama_metadata("llama_nine_heads"), llama_tensors("llama_nine_heads")
    )


def make_t5x(folder: Path) -> Path:
    from tests.test_t5x import oracle_weights, tree_of, write_tree

    return write_tree(folder / "a", tree_of(oracle_weights()))


# format → (how it is made, the file in it that is damaged, bytes of it that are worth damaging)
FORMATS: dict[str, tuple[Callable[[Path], Path], str, int | None]] = {
    "npz": (make_npz, "", None),
    "torch": (make_torch, "", None),
    "leaves": (make_leaves, "", None),
    "safetensors as torch": (make_torch_folder, "pytorch_model.bin", 3000),
    "native metadata": (make_orbax, "checkpoint.json", None),
    "native weights": (make_orbax, "weights_0/manifest.ocdbt", None),
    "t5x tree": (make_t5x, "checkpoint", 700),
    "safetensors header": (make_single, "model.safetensors", 2600),
    "safetensors index": (make_hugging_face, "model.safetensors.index.json", None),
    "hugging face config": (make_hugging_face, "config.json", None),
    "gguf header": (make_gguf, "", 2200),
}
MARKS = {"safetensors": NEEDS_SAFETENSORS, "hugging": NEEDS_SAFETENSORS, "gguf": NEEDS_GGUF}


def mutations(content: bytes, rng: np.random.Generator, reach: int) -> Iterator[bytes]:
    """Damaged copies, in turn: cut, one byte flipped, a run overwritten, eight bytes of ones."""
    for case in range(CASES):
        at = int(rng.integers(0, reach))
        if case % 4 == 0:
            yield content[:at]
        elif case % 4 == 1:
            yield content[:at] + bytes([content[at] ^ int(rng.integers(1, 256))]) + content[at + 1 :]
        elif case % 4 == 2:
            run = rng.integers(0, 256, int(rng.integers(1, 40)), np.uint8).tobytes()
            yield content[:at] + run + content[at + len(run) :]
        else:
            yield content[:at] + b"\xff" * 8 + content[at + 8 :]


def outcome(path: Path) -> str | None:
    """The line with which a checkpoint is refused; None if every array of it is read."""
    try:
        opened = open_checkpoint(path, ReaderOptions(dim_head=2) if path.suffix == ".eqx" else None)
        for entry in opened.state.weights.values():
            parts = (entry.qvalue, entry.scale) if isinstance(entry, QuantizedTensor) else (entry,)
            for part in parts:
                assert np.asarray(part).shape == tuple(part.shape)
    except UserError as error:
        return str(error)
    return None


def check(path: Path, what: object) -> bool:
    """Whether the checkpoint is refused, properly; anything improper fails."""
    began = time.process_time()
    tracemalloc.start()
    line = outcome(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - began < SECONDS, what
    assert peak < MEMORY, what
    if line is not None:
        assert "\n" not in line, what
        assert str(path) in line, (what, line)
        assert len(line) < 1500, what
    return line is not None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name.split()[0], ())) for name in FORMATS]
)
def test_damage_gives_a_line_or_right_arrays(name: str, tmp_path: Path) -> None:
    make, inner, reach = FORMATS[name]
    path = make(tmp_path)
    assert outcome(path) is None
    file = path / inner if inner else path
    content = file.read_bytes()
    refused = 0
    rng = np.random.default_rng(list(name.encode()))
    for case, damaged in enumerate(mutations(content, rng, min(len(content), reach or len(content)))):
        file.write_bytes(damaged)
        refused += check(path, (name, case))
    assert refused > CASES // 3
    file.write_bytes(content)
    assert outcome(path) is None


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e400, "x", "", [], {}, [1], {"a": 1}, "../../etc/passwd", "\n",
)  # fmt: skip


@NEEDS_SAFETENSORS
@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon_40b", "gpt_neox", "gptj"])
def test_any_value_of_any_config_field_gives_a_line_or_a_model(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / name, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    rng = np.random.default_rng(len(name))
    for field in config:
        value = VALUES[int(rng.integers(0, len(VALUES)))]
        (tmp_path / "a" / "config.json").write_text(json.dumps(config | {field: value}))
        check(tmp_path / "a", (field, value))


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    arrays = palm_pytorch_arrays()
    for key in arrays:
        path = write_torch(tmp_path / "a.pt", {k: a for k, a in arrays.items() if k != key})
        assert check(path, key), key
        path = write_torch(tmp_path / "a.pt", arrays | {f"{key}x": arrays[key]})
        assert check(path, key), key
        path = write_torch(tmp_path / "a.pt", arrays | {key: arrays[key][..., :-1].copy()})
        assert check(path, key) or key.endswith("inv_freq"), key


def tokenizer_outcome(path: Path) -> str | None:
    """The line with which a tokenizer is refused; None if it encodes."""
    try:
        open_tokenizer(path).encode("the cat")
    except UserError as error:
        return str(error)
    return None


@NEEDS_TOKENIZERS
def test_damaged_tokenizers_give_a_line(tmp_path: Path, rng: np.random.Generator) -> None:
    from tests.test_json_tokenizer import byte_level

    content = byte_level().encode()
    path = tmp_path / "tokenizer.json"
    for case, damaged in enumerate(mutations(content, rng, len(content))):
        path.write_bytes(damaged)
        line = tokenizer_outcome(path)
        assert line is None or ("\n" not in line and str(path) in line), (case, line)


def test_the_good_files_are_what_they_seem(tmp_path: Path) -> None:
    assert len(read_npz(make_npz(tmp_path)).arrays) == 7
    assert CASES * (len(FORMATS) + 1) >= 500
