"""PyTorch files are read without torch and without running their pickle; the rest is refused by name.

Idea: the oracles' tensors, written as PyTorch writes them, must read as they do from `.npz`. Pickles that
would run code are opened and leave no trace. Where torch is installed its own files are read too.

Data flow: tensors → `torch_files` (by hand) or `torch.save` → `open_checkpoint` → arrays; damage → the line.

Worked example: a pickle that calls os.mkdir gives "…: its pickle wants to call posix.mkdir, which is no part
of a tensor; nothing was run".
"""

import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.formats import Container, detect, open_checkpoint
from checkpoints.npz_source import read_npz
from checkpoints.readers.options import ReaderOptions
from checkpoints.torch_source import read_torch
from layers.errors import UserError
from tests.torch_files import (
    contiguous,
    name,
    number,
    numbers,
    state_dict,
    tensor,
    text,
    write_torch,
    write_zip,
)  # fmt: skip

ORACLES = Path(__file__).parent / "oracles"
FILES = {"palm_pytorch_0.2.2.npz": ReaderOptions(), "palm_rlhf_0.2.1.npz": ReaderOptions(gamma_offset=0)}


@pytest.mark.parametrize("wrapper", [None, "model"])
@pytest.mark.parametrize("file", FILES)
def test_a_pytorch_file_reads_as_its_tensors_do(file: str, wrapper: str | None, tmp_path: Path) -> None:
    arrays = {key: np.asarray(array) for key, array in read_npz(ORACLES / file).arrays.items()}
    path = write_torch(tmp_path / "palm.pt", arrays, wrapper)
    assert detect(path) is Container.TORCH
    expected, found = (
        open_checkpoint(ORACLES / file, FILES[file]).state,
        open_checkpoint(path, FILES[file]).state,
    )
    assert found.hparams == expected.hparams
    assert found.weights.keys() == expected.weights.keys()
    for key, entry in expected.weights.items():
        np.testing.assert_array_equal(np.asarray(found.weights[key]), np.asarray(entry))


def test_a_pytorch_file_of_a_later_release_needs_the_gain_s_meaning(tmp_path: Path) -> None:
    arrays = {key: np.asarray(a) for key, a in read_npz(ORACLES / "palm_rlhf_0.2.1.npz").arrays.items()}
    path = write_torch(tmp_path / "palm.pt", arrays)
    with pytest.raises(UserError, match="set gamma_offset to 0 or 1"):
        open_checkpoint(path)
    assert open_checkpoint(path, ReaderOptions(gamma_offset=1)).state.hparams.norm_gain_offset == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.int64])
def test_any_rectangle_of_any_dtype_is_read(dtype: type, tmp_path: Path, rng: np.random.Generator) -> None:
    array = (10 * rng.normal(size=(6, 5, 4))).astype(dtype)
    arrays = read_torch(
        write_torch(tmp_path / "a.pt", {"a": array, "b": array[:0], "c": array[0, 0, 0]})
    ).arrays
    np.testing.assert_array_equal(np.asarray(arrays["a"]), array)
    np.testing.assert_array_equal(arrays["a"][1:4, 2, 1:], array[1:4, 2, 1:])
    assert arrays["b"].shape == (0, 5, 4)
    assert np.asarray(arrays["c"])[()] == array[0, 0, 0]


def test_views_of_one_storage_are_read_as_views(tmp_path: Path) -> None:
    data = np.arange(12, dtype=np.float32)
    values = {
        "turned": tensor("0", "FloatStorage", 12, (4, 3), (1, 4)),
        "later": tensor("0", "FloatStorage", 12, (2, 3), (3, 1), offset=6),
    }
    path = write_zip(tmp_path / "a.pt", {"data.pkl": state_dict(values), "data/0": data.tobytes()})
    arrays = read_torch(path).arrays
    np.testing.assert_array_equal(np.asarray(arrays["turned"]), data.reshape(3, 4).T)
    np.testing.assert_array_equal(np.asarray(arrays["later"]), data[6:].reshape(2, 3))


class Payload:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize("protocol", range(6))
def test_no_pickle_is_ever_executed(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    path = write_zip(tmp_path / "a.pt", {"data.pkl": pickle.dumps({"a": Payload(trace)}, protocol)})
    with pytest.raises(UserError) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)
    assert not trace.exists()
    if protocol >= 2:
        assert "wants to call posix.mkdir, which is no part of a tensor; nothing was run" in str(error.value)


GOOD = tensor("0", "FloatStorage", 6, (2, 3), (3, 1))
DATA = bytes(24)


def with_pickle(content: bytes, **members: bytes) -> dict[str, bytes]:
    return {"data.pkl": content, "data/0": DATA} | {
        key.replace("_", "/"): raw for key, raw in members.items()
    }


def called(function: bytes, arguments: bytes) -> bytes:
    return state_dict({"a": function + arguments + pickle.REDUCE})


HUGE = 1 << 40
BAD: dict[str, tuple[dict[str, bytes], str]] = {
    "truncated pickle": (with_pickle(state_dict({"a": GOOD})[:-9]), "its pickle is truncated or damaged"),
    "empty pickle": (with_pickle(b""), "its pickle is truncated or damaged"),
    "no dict": (with_pickle(b"\x80\x02" + GOOD + b"."), "it holds a StoredTensor"),
    "no tensors": (with_pickle(state_dict({})), "'None' is no tensor; expected a dict of tensors"),
    "a number": (with_pickle(state_dict({"a": GOOD, "lr": number(3)})), "'lr' is no tensor"),
    "eval": (with_pickle(called(name("builtins", "eval"), numbers(()))), "wants to call builtins.eval"),
    "torch.load": (with_pickle(called(name("torch", "load"), numbers(()))), "wants to call torch.load"),
    "call of a call": (with_pickle(called(GOOD, numbers(()))), "calls something that is no function"),
    "instance": (with_pickle(b"\x80\x02(ios\nsystem\n."), "has the instruction INST, which"),
    "extension": (with_pickle(b"\x80\x02\x82\x01."), "has the instruction EXT1, which"),
    "huge memo": (with_pickle(b"\x80\x02}r\xff\xff\xff\x7f."), "'None' is no tensor"),
    "key twice": (
        with_pickle(state_dict({"a": GOOD})[:-2] + text("a") + GOOD + b"u."), "has the key 'a' twice",
    ),
    "terabytes": (
        with_pickle(state_dict({"a": tensor("0", "FloatStorage", HUGE, (1 << 20, 1 << 20), (1 << 20, 1))})),
        "a claims [1048576, 1048576] of float32, its storage holds 6 elements",
    ),
    "the same element for ever": (
        with_pickle(state_dict({"a": tensor("0", "FloatStorage", 6, (1 << 20, 1 << 20), (0, 0))})),
        "a claims [1048576, 1048576] of float32, its storage holds 6 elements",
    ),
    "beyond the storage": (
        with_pickle(state_dict({"a": tensor("0", "FloatStorage", 6, (2, 3), (3, 1), offset=1)})),
        "a claims [2, 3] of float32, its storage holds 6 elements",
    ),
    "negative size": (
        with_pickle(state_dict({"a": tensor("0", "FloatStorage", 6, (2, 3), (3, 1)).replace(
            number(6), pickle.BININT + b"\xff\xff\xff\xff", 1).replace(
            numbers((2, 3)), pickle.MARK + pickle.BININT + b"\xfe\xff\xff\xff" + pickle.TUPLE)})),
        "has a tensor of an unknown form",
    ),
    "missing storage": (
        with_pickle(state_dict({"a": tensor("7", "FloatStorage", 6, (2, 3), (3, 1))})),
        "a is in storage 7, which is missing",
    ),
    "unknown storage": (
        with_pickle(state_dict({"a": tensor("0", "QInt8Storage", 6, (2, 3), (3, 1))})),
        "wants to call torch.QInt8Storage",
    ),
    "big-endian": (with_pickle(state_dict({"a": GOOD}), byteorder=b"big"), "not little-endian"),
    "unprintable": (with_pickle(state_dict({"a\nb": GOOD})), "a tensor is named 'a\\nb'"),
    "no known model": (with_pickle(state_dict({"a": GOOD})), "no known one has tensors named a"),
}  # fmt: skip


@pytest.mark.parametrize(("members", "message"), BAD.values(), ids=BAD)
def test_what_is_no_state_dict_is_refused_by_name(
    members: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    path = write_zip(tmp_path / "a.pt", members)
    tracemalloc.start()
    with pytest.raises(UserError) as error:
        open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert peak < 10 << 20


def test_a_compressed_storage_is_refused_without_unpacking_it(tmp_path: Path) -> None:
    content = state_dict({"a": tensor("0", "FloatStorage", 1 << 24, (1 << 24,), (1,))})
    members = {"data.pkl": content, "data/0": bytes(1 << 26)}
    path = write_zip(tmp_path / "a.pt", members, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    with pytest.raises(UserError, match="a is in a compressed or encrypted member"):
        open_checkpoint(path)


@pytest.mark.oracle_live
@pytest.mark.filterwarnings("default")
def test_files_of_torch_itself_are_read(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    base = torch.randn(6, 8)
    saved = {
        "plain": base, "turned": base.T, "rows": base[2:4], "half": base.half(), "bf16": base.bfloat16(),
        "parameter": torch.nn.Parameter(base.clone()), "ids": torch.arange(5),
    }  # fmt: skip
    torch.save(saved, tmp_path / "a.pt")
    found = read_torch(tmp_path / "a.pt").arrays
    for key, value in saved.items():
        np.testing.assert_array_equal(
            np.asarray(found[key]).astype(np.float32), value.detach().float().numpy()
        )
    module = torch.nn.Linear(4, 3)
    torch.save({"epoch": 3, "model": module.state_dict()}, tmp_path / "b.pt")
    arrays = read_torch(tmp_path / "b.pt").arrays
    np.testing.assert_array_equal(np.asarray(arrays["weight"]), module.weight.detach().numpy())


def test_strides_of_a_whole_array() -> None:
    assert contiguous((4, 3, 2)) == (6, 2, 1)
