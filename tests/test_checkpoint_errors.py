"""What is no checkpoint is refused in one line that says what it is and what is expected.

Idea: paths of every wrong kind are opened through the one door that the command line uses. Files are cut at
many places and their headers flipped; whatever happens, the outcome is a UserError or the right arrays,
without unpickling and without memory for what a header merely claims.

Data flow: a bad path → `open_checkpoint` → UserError with one line that names the path.

Worked example: a JPEG gives "…/photo.npz: a JPEG image; expected a folder with checkpoint.json (a saved
checkpoint), a Hugging Face folder (safetensors), a T5X folder, a GGUF file, a PyTorch .pt file or an .npz
file of named tensors".
"""

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpoints.formats import EXPECTED, Container, detect, open_checkpoint
from checkpoints.npz_source import read_npz
from checkpoints.orbax_store import save_checkpoint
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from tests.model_forms import FORMS, random_weights

ORACLES = Path(__file__).parent / "oracles"
ORACLE = ORACLES / "palm_pytorch_0.2.2.npz"


def message(path: Path, options: ReaderOptions | None = None) -> str:
    """The one line with which a path is refused."""
    with pytest.raises(UserError) as error:
        open_checkpoint(path, options)
    text = str(error.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text.removeprefix(str(path))


class Payload:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return (os.mkdir, (str(self.trace),))


def plain_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "hello")
    return buffer.getvalue()


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ": an empty file; "),
    "jpeg": (b"\xff\xd8\xff\xe0\x00\x10JFIF", ": a JPEG image; "),
    "png": (b"\x89PNG\r\n\x1a\n....", ": a PNG image; "),
    "pdf": (b"%PDF-1.7", ": a PDF document; "),
    "text": ("A rose by any other näme".encode() * 40, ": a text file; "),
    "text cut inside a character": (b"a" * 399 + "ä".encode() * 9, ": a text file; "),
    "noise": (bytes(range(130, 250)) * 5, ": a file of an unknown kind; "),
    "zeros": (bytes(600), ": a file of an unknown kind; "),
    "pickle": (pickle.dumps([1, 2]), ": a Python pickle, which is never loaded; "),
    "gzip": (b"\x1f\x8b\x08", ": a gzip file; "),
    "zip": (plain_zip(), ": a zip file without NumPy arrays; "),
    "half a zip": (ORACLE.read_bytes()[:3000], ": a truncated or damaged zip file ("),
}


@pytest.mark.parametrize(("content", "kind"), FILES.values(), ids=FILES)
def test_foreign_files_are_named_for_what_they_are(content: bytes, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(content)
    text = message(path)
    assert text.startswith(kind)
    assert text.endswith(EXPECTED)


FOLDERS = {
    "empty": ([], ": an empty folder; "),
    "something": (["a.txt"], ": a folder without checkpoint.json; "),
    "hugging face without weights": (["config.json"], ": no weights in it; expected model.safetensors,"),
    "hugging face without config": (["model.safetensors"], "/config.json: missing; the weights do not say"),
    "several files": (
        ["config.json", "a.safetensors", "b.safetensors"],
        ": 2 safetensors files without model",
    ),
    "orbax": (["_CHECKPOINT_METADATA", "_METADATA"], ": an Orbax checkpoint without checkpoint.json; "),
}


@pytest.mark.parametrize(("names", "kind"), FOLDERS.values(), ids=FOLDERS)
def test_foreign_folders_are_named_for_what_they_are(names: list[str], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    assert message(path).startswith(kind)


def test_a_missing_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "palm_8b").mkdir()
    text = message(tmp_path / "palm_8B")
    assert text.startswith(f": no such file or folder; there is {tmp_path / 'palm_8b'}; ")
    assert "there is" not in message(tmp_path / "zzz")
    assert "there is" not in message(tmp_path / "no" / "folder")


def test_a_link_to_nowhere_and_a_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert message(tmp_path / "link").startswith(": no such file or folder")
    os.mkfifo(tmp_path / "pipe")
    assert message(tmp_path / "pipe").startswith(": not a regular file")


def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.npz"
    path.write_bytes(ORACLE.read_bytes())

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert message(path) == ": cannot be read (Permission denied)"
    monkeypatch.setattr(os, "listdir", refuse)
    assert message(tmp_path) == ": cannot be read (Permission denied)"


def test_good_checkpoints_are_recognised(tmp_path: Path) -> None:
    assert detect(ORACLE) is Container.NPZ
    save_checkpoint(tmp_path / "a", CheckpointState(FORMS["palm"], random_weights(FORMS["palm"], 0)))
    assert detect(tmp_path / "a") is Container.ORBAX
    opened = open_checkpoint(ORACLE)
    assert opened.source == str(ORACLE)
    assert opened.tokenizer_file is None
    assert opened.state.hparams.layers == 3


def test_an_option_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", CheckpointState(FORMS["palm"], random_weights(FORMS["palm"], 0)))
    assert "already says how its norm gains act" in message(tmp_path / "a", ReaderOptions(gamma_offset=0))
    assert "can only be 0" in message(ORACLE, ReaderOptions(gamma_offset=1))
    assert open_checkpoint(ORACLES / "palm_rlhf_0.2.1.npz", ReaderOptions(gamma_offset=1)).state is not None


def write_npz(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


def claiming(shape: tuple[int, ...]) -> bytes:
    """A NumPy header for this shape of float32, and eight bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return buffer.getvalue() + bytes(8)


TENSOR = {"w::a.npy": npy(np.ones((2, 3), np.float32))}
BAD_MEMBERS: dict[str, tuple[dict[str, bytes], str]] = {
    "no tensors": ({"ids.npy": npy(np.ones(3))}, ": no tensors; expected members named w::NAME"),
    "unprintable name": ({"w::a\nb.npy": TENSOR["w::a.npy"]}, ": a member is named 'w::a\\nb.npy', which is"),
    "no array": ({"w::a.npy": b"hello"}, ": w::a.npy is not a NumPy array"),
    "half a header": ({"w::a.npy": npy(np.ones(3))[:20]}, ": w::a.npy is not a NumPy array"),
    "later format": ({"w::a.npy": b"\x93NUMPY\x09\x00" + bytes(80)}, ": w::a.npy is not a NumPy array"),
    "objects": (
        {"w::a.npy": npy(np.array([{}], object), allow_pickle=True)},
        ": w::a.npy has dtype object, expected numbers",
    ),
    "records": (
        {"w::a.npy": npy(np.zeros((2,), np.dtype([("a", "f4"), ("b", "i4")])))},
        ": w::a.npy has dtype [('a'",
    ),
    "terabytes": ({"w::a.npy": claiming((1 << 20, 1 << 22))}, ": w::a.npy claims [1048576, 4194304] of"),
    "more than fits an integer": ({"w::a.npy": claiming((1 << 40, 1 << 40))}, ": w::a.npy claims ["),
    "less than is there": ({"w::a.npy": claiming((1,))}, ": w::a.npy claims [1] of float32, but holds 8"),
    "config no JSON": (TENSOR | {"meta.npy": npy(np.array("{"))}, ": meta is not JSON ("),
    "config a list": (TENSOR | {"meta.npy": npy(np.array("[1]"))}, ": meta is a JSON list, expected an"),
    "config numbers": (TENSOR | {"meta.npy": npy(np.ones(3))}, ": meta is float64 [3], expected one"),
    "config huge": (TENSOR | {"meta.npy": bytes(5 << 20)}, ": meta has 5242880 bytes, expected at most"),
    "nothing known": (TENSOR, ": no config says which model this is, and no known one has tensors named a; "),
    "model type": (
        TENSOR | {"meta.npy": npy(np.array(json.dumps({"model_type": "gpt2"})))},
        ": model type 'gpt2' is not supported; supported: Llama,",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("members", "expected"), BAD_MEMBERS.values(), ids=BAD_MEMBERS)
def test_bad_members_are_refused_by_name(members: dict[str, bytes], expected: str, tmp_path: Path) -> None:
    assert message(write_npz(tmp_path / "a.npz", members)).startswith(expected)


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w::a.npy", TENSOR["w::a.npy"])
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("w::a.npy", TENSOR["w::a.npy"])
    assert message(path) == ": two members are named w::a.npy"


def test_a_claimed_size_takes_no_memory(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", {"w::a.npy": claiming((1 << 20, 1 << 22))})
    tracemalloc.start()
    message(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_no_pickle_is_ever_executed(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    (tmp_path / "a.npz").write_bytes(pickle.dumps(Payload(trace)))
    message(tmp_path / "a.npz")
    stored = npy(np.array([Payload(trace)], object), allow_pickle=True)
    for name in ("w::a.npy", "meta.npy"):
        message(write_npz(tmp_path / "b.npz", TENSOR | {name: stored}))
    assert not trace.exists()


@pytest.fixture(scope="module")
def small_npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid file small enough to damage at many places."""
    rng = np.random.default_rng(0)
    shapes = {
        "0.weight": (8, 4), "1.fn.norm.gamma": (4,), "1.fn.rotary_emb.inv_freq": (1,),
        "1.fn.fused_attn_ff_proj.weight": (20, 4), "1.fn.attn_out.weight": (4, 4),
        "1.fn.ff_out.1.weight": (4, 6), "2.gamma": (4,),
    }  # fmt: skip
    tensors = {f"w::{key}": rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    path = tmp_path_factory.mktemp("small") / "a.npz"
    np.savez(path, meta=json.dumps({"eps": 1e-5}), **tensors)
    return path


def outcome(path: Path) -> tuple[str | None, dict[str, np.ndarray]]:
    """The message, or None and all arrays."""
    try:
        state = open_checkpoint(path).state
        return None, {key: np.asarray(entry) for key, entry in state.weights.items()}
    except UserError as error:
        return str(error), {}


def test_a_file_cut_anywhere_is_refused(small_npz: Path, tmp_path: Path) -> None:
    content = small_npz.read_bytes()
    assert outcome(small_npz)[0] is None
    path = tmp_path / "a.npz"
    for end in range(0, len(content), 37):
        path.write_bytes(content[:end])
        text, _ = outcome(path)
        assert text is not None, end
        assert text.startswith(f"{path}: "), end
        assert "\n" not in text, end


def test_a_flipped_byte_is_refused_or_harmless(small_npz: Path, tmp_path: Path) -> None:
    """Data have checksums; a flip elsewhere may hit a timestamp or another field that nobody reads."""
    content = small_npz.read_bytes()
    _, expected = outcome(small_npz)
    path = tmp_path / "a.npz"
    refused = 0
    places = list(range(3, len(content), 41))
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xA5]) + content[place + 1 :])
        text, found = outcome(path)
        if text is None:
            for key, array in expected.items():
                np.testing.assert_array_equal(found[key], array, err_msg=f"{place} {key}")
        else:
            assert text.startswith(f"{path}: "), place
            assert "\n" not in text, place
            refused += 1
    assert refused > len(places) // 2


def test_arrays_in_fortran_order_are_read_as_they_are(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    path = write_npz(tmp_path / "a.npz", {"w::a.npy": npy(array)})
    np.testing.assert_array_equal(np.asarray(read_npz(path).arrays["a"]), array)
