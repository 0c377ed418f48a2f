"""PyTorch files for tests, written without torch: the zip of `torch.save`, its pickle put together by hand.

Worked example: `write_torch(path, {"a": array})` writes the members archive/data.pkl, archive/byteorder and
archive/data/0.
"""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

KINDS = {
    "float32": "FloatStorage", "float16": "HalfStorage", "float64": "DoubleStorage", "int64": "LongStorage",
    "bfloat16": "BFloat16Storage",
}  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return pickle.BININT + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw


def numbers(values: tuple[int, ...]) -> bytes:
    return pickle.MARK + b"".join(map(number, values)) + pickle.TUPLE


def tensor(
    key: str, kind: str, numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> bytes:
    """The instructions that describe one tensor."""
    storage = (
        pickle.MARK + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(numel)
        + pickle.TUPLE + pickle.BINPERSID
    )  # fmt: skip
    hooks = name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    arguments = storage + number(offset) + numbers(shape) + numbers(stride) + pickle.NEWFALSE + hooks
    return name("torch._utils", "_rebuild_tensor_v2") + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE


def state_dict(values: Mapping[str, bytes]) -> bytes:
    """A pickle of a dict with these instructions as its values."""
    pairs = b"".join(text(key) + value for key, value in values.items())
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS + pickle.STOP


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


def write_zip(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for member, content in members.items():
            archive.writestr(f"archive/{member}", content)
    return path


def write_torch(path: Path, arrays: Mapping[str, np.ndarray], wrapper: str | None = None) -> Path:
    """Writes a state dict, inside another dict if a wrapper's key is named."""
    values, members = {}, {"byteorder": b"little"}
    for index, (key, array) in enumerate(arrays.items()):
        kind = KINDS[array.dtype.name]
        values[key] = tensor(str(index), kind, array.size, array.shape, contiguous(array.shape))
        members[f"data/{index}"] = np.ascontiguousarray(array).tobytes()
    content = state_dict(values)
    if wrapper is not None:
        content = state_dict({"step": number(3), wrapper: content[2:-1]})
    return write_zip(path, {"data.pkl": content} | members)
