"""safetensors files are read rectangle by rectangle, and what is wrong with one is said in one line.

Idea: good folders are copied and damaged in one way each: header, data, index, links. Every outcome is a
UserError that names the file, before memory is taken for what a header merely claims.

Data flow: a damaged copy of a folder → `open_checkpoint` → the line.

Worked example: an index that places `lm_head.weight` in a shard that is not there gives "…: lm_head.weight is
in model-00009.safetensors, which is missing".
"""

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.safetensors_source import read_safetensors
from layers.errors import UserError
from tests.extras import NEEDS_SAFETENSORS
from tests.huggingface_models import FOLDER

pytestmark = NEEDS_SAFETENSORS

INDEX = "model.safetensors.index.json"
SHARDED, SINGLE = FOLDER / "llama", FOLDER / "mistral"


def written(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with this header (bytes as they are, else JSON) and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def read_all(path: Path) -> None:
    for entry in open_checkpoint(path).state.weights.values():
        np.asarray(entry)


def line(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_all(path)
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_any_rectangle_of_any_float_dtype_is_read(
    dtype: type, tmp_path: Path, rng: np.random.Generator
) -> None:
    array = rng.normal(size=(7, 5, 3)).astype(dtype)
    from safetensors.numpy import save_file

    save_file({"a": array, "empty": array[:0]}, tmp_path / "a.safetensors")
    arrays = read_safetensors(tmp_path / "a.safetensors")
    assert arrays["a"].dtype == dtype
    assert arrays["empty"].shape == (0, 5, 3)
    np.testing.assert_array_equal(np.asarray(arrays["a"]), array)
    np.testing.assert_array_equal(arrays["a"][2:5, 1, ...], array[2:5, 1])
    np.testing.assert_array_equal(arrays["a"][6:7, :, 0:2], array[6:7, :, :2])


def test_a_single_file_is_opened_with_the_config_beside_it() -> None:
    assert detect(SINGLE / "model.safetensors") is Container.HUGGING_FACE
    opened, folder = open_checkpoint(SINGLE / "model.safetensors"), open_checkpoint(SINGLE)
    assert opened.state.hparams == folder.state.hparams
    np.testing.assert_array_equal(
        np.asarray(opened.state.weights["layer_1/q"]), np.asarray(folder.state.weights["layer_1/q"])
    )


BAD_FILES: dict[str, tuple[object, bytes, str]] = {
    "cut in the header": (b'{"a": {"dty', b"", "its header is no JSON"),
    "cut in the data": ({"a": tensor("F32", [4], 0, 16)}, bytes(8), "truncated or damaged"),
    "more data": ({"a": tensor("F32", [4], 0, 16)}, bytes(24), "truncated or damaged"),
    "terabytes": ({"a": tensor("F32", [1 << 20, 1 << 22], 0, 1 << 44)}, bytes(8), "truncated or damaged"),
    "overflow": ({"a": tensor("F32", [1 << 62, 1 << 62], 0, 8)}, bytes(8), "truncated or damaged"),
    "wrong size": ({"a": tensor("F32", [3], 0, 16)}, bytes(16), "truncated or damaged"),
    "overlap": (
        {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12), "truncated or damaged",
    ),
    "negative": ({"a": tensor("F32", [-4], 0, 16)}, bytes(16), "truncated or damaged"),
    "unknown dtype": ({"a": tensor("F12", [4], 0, 6)}, bytes(6), "truncated or damaged"),
    "unsupported dtype": ({"a": tensor("F8_E4M3", [4], 0, 4)}, bytes(4), "a has dtype F8_E4M3, which is not"),
    "integers": (
        {"model.embed_tokens.weight": tensor("I32", [4], 0, 16)}, bytes(16), "model.embed_tokens.weight has",
    ),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":5}', b"", "two tensors are named a",
    ),
    "unprintable": ({"a\nb": tensor("F32", [1], 0, 4)}, bytes(4), "a tensor is named 'a\\nb', which is not"),
    "a list": (b"{[1, 2]", b"", "its header is no JSON"),
    "nested": (b'{"a":' + b"[" * 40000, b"", "its header is no JSON"),
    "other tensors": ({"a": tensor("F32", [1], 0, 4)}, bytes(4), "missing model.embed_tokens.weight"),
    "no tensors": ({}, b"", "missing model.embed_tokens.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "data", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused_by_name(header: object, data: bytes, message: str, tmp_path: Path) -> None:
    shutil.copy(SINGLE / "config.json", tmp_path)
    written(tmp_path / "model.safetensors", header, data)
    assert message in line(tmp_path)


def test_a_header_longer_than_the_file_is_refused_without_memory(tmp_path: Path) -> None:
    shutil.copy(SINGLE / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    tracemalloc.start()
    assert "its header claims 1,099,511,627,776 bytes, the file has 10" in line(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def edited_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index) or index))

    return edit


def place(name: str, shard: str) -> Callable[[Path], None]:
    return edited_index(lambda index: index["weight_map"].update({name: shard}))


def link_out(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        target = folder.parent / f"elsewhere-{name}"
        (folder / name).rename(target)
        (folder / name).symlink_to(target)

    return link


HEAD, FIRST = "lm_head.weight", "model-00001-of-00003.safetensors"
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (place(HEAD, "model-00009.safetensors"), f"{HEAD} is in model-00009.safetensors, which"),
    "shard removed": (lambda folder: (folder / FIRST).unlink(), f"is in {FIRST}, which is missing"),
    "path in the index": (place(HEAD, "../llama/x.safetensors"), "expected the name of a file in the folder"),
    "absolute path": (place(HEAD, "/etc/passwd"), "expected the name of a file in the folder"),
    "number for a shard": (edited_index(lambda i: i["weight_map"].update(a=3)), "a is in 3, expected the"),
    "tensor not there": (place("extra.weight", FIRST), f"no extra.weight, although {INDEX} says"),
    "tensor not placed": (
        edited_index(lambda i: i["weight_map"].pop("model.norm.weight") and None),
        "model.norm.weight is not placed here",
    ),
    "no map": (edited_index(lambda i: {"metadata": {}}), "weight_map is None, expected an object"),
    "empty map": (edited_index(lambda i: {"weight_map": {}}), "weight_map is {}, expected an object"),
    "index cut": (lambda f: (f / INDEX).write_text((f / INDEX).read_text()[:300]), "truncated or not JSON"),
    "index a list": (lambda f: (f / INDEX).write_text("[]"), "a JSON list, expected an object"),
    "index twice": (lambda f: (f / INDEX).write_text('{"a": 1, "a": 2}'), "the key 'a' is there twice"),
    "index not UTF-8": (lambda f: (f / INDEX).write_bytes(b'{"\xff": 1}'), "truncated or not JSON"),
    "config cut": (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "truncated or not JSON"),
    "config removed": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "shard links out": (link_out(FIRST), "a link out of its folder"),
    "config links out": (link_out("config.json"), "a link out of its folder"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_a_bad_folder_is_refused_by_name(spoil: Callable, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHARDED, folder)
    spoil(folder)
    assert message in line(folder)


def test_the_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(SHARDED, blobs)
    for name in os.listdir(blobs):
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / name)
    assert open_checkpoint(snapshot).state.hparams == open_checkpoint(SHARDED).state.hparams


def test_a_folder_of_one_oddly_named_file_is_read(tmp_path: Path) -> None:
    shutil.copytree(SINGLE, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights.safetensors")
    assert open_checkpoint(tmp_path / "model").state.hparams == open_checkpoint(SINGLE).state.hparams


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a pipe, a socket or a device; expected a file"):
        read_safetensors(tmp_path / "model.safetensors")
