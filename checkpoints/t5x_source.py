"""Named arrays from a T5X folder: a msgpack tree whose leaves are arrays or places of tensorstore arrays.

    PATH/checkpoint                                     the tree, flax's msgpack
    PATH/target.decoder.decoder.kv_fused.kernel/ …      zarr arrays that leaves point to

A leaf names a driver, a path and metadata. Only zarr arrays inside the folder are opened, whatever a leaf
asks for; the store's own metadata says shape and dtype.

Data flow: path → tree → flat names (`target/decoder/…`) → `NamedArrays` of lazy arrays; optimizer state is
left alone. `form.json` beside the tree, if any, is the config.

Worked example: {"driver": "zarr", "kvstore": {"driver": "gfile", "path": "target.a/"}, "metadata": …} is the
array PATH/target.a.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints.files import check_inside, read_json_object
from checkpoints.lazy import ArrayLike, Box, LazyArray
from checkpoints.named_arrays import NamedArrays
from layers.errors import UserError

TREE_FILE = "checkpoint"
FORM_FILE = "form.json"
_TARGETS = ("target", "optimizer/target")
_MAX_TREE_BYTES = 1 << 32
_CACHE_BYTES = 1 << 26


def read_t5x(path: Path) -> NamedArrays:
    """The parameters of a T5X folder, lazily, without the prefix up to `target`.

    Raises UserError naming the file or the leaf: truncated, no parameters, a place outside the folder, an
    array that is missing or damaged.
    """
    tree = path / TREE_FILE
    check_inside(tree)
    flat = _flat(tree)
    root = next((root for root in _TARGETS if any(name.startswith(f"{root}/") for name in flat)), None)
    if root is None:
        raise UserError(f"{tree}: no {' or '.join(_TARGETS)} in it; expected T5X parameters")
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    arrays = {
        name.removeprefix(f"{root}/"): _array(path, name, leaf, context)
        for name, leaf in flat.items()
        if name.startswith(f"{root}/")
    }
    form = path / FORM_FILE
    return NamedArrays(str(path), arrays, read_json_object(form) if form.is_file() else {})


def _flat(tree: Path) -> dict[str, Any]:
    """Leaves by their path in the tree."""
    from flax import serialization

    try:
        size = tree.stat().st_size
        nested = serialization.msgpack_restore(tree.read_bytes() if size <= _MAX_TREE_BYTES else b"")
    except OSError as error:
        raise UserError(f"{tree}: cannot be read ({error.strerror})") from None
    except Exception as error:  # msgpack raises what it likes on damage
        raise UserError(f"{tree}: truncated or no T5X checkpoint ({_line(error)})") from None
    flat: dict[str, Any] = {}
    waiting = [("", nested)]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, dict) and not {"driver", "kvstore"} <= node.keys():
            waiting += [(f"{prefix}/{key}" if prefix else str(key), child) for key, child in node.items()]
        else:
            flat[prefix] = node
    return dict(sorted(flat.items()))


def _array(folder: Path, name: str, leaf: Any, context: ts.Context) -> ArrayLike:
    """One leaf as an array."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if not isinstance(leaf, dict):
        raise UserError(f"{folder / TREE_FILE}: {name[:80]} is a {type(leaf).__name__}, expected an array")
    place = leaf["kvstore"].get("path") if isinstance(leaf["kvstore"], dict) else None
    plain = place.rstrip("/") if isinstance(place, str) else ""
    if leaf["driver"] != "zarr" or plain in ("", ".", "..") or Path(plain).name != plain:
        raise UserError(
            f"{folder / TREE_FILE}: {name[:80]} is at {str(place)[:60]!r} ({str(leaf['driver'])[:20]}), "
            "expected a zarr array in the folder"
        )
    check_inside(folder / plain)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / plain}/"}}
    try:
        store = ts.open(spec, read=True, context=context).result()
    except Exception as error:  # storage raises what it likes on damage
        raise UserError(f"{folder / plain}: {name[:80]} is missing or damaged ({_line(error)})") from None
    return LazyArray(tuple(store.shape), store.dtype.numpy_dtype, _Stored(folder / plain, store))


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """Read a rectangle of one stored array."""

    path: Path
    store: ts.TensorStore

    def __call__(self, box: Box) -> np.ndarray:
        try:
            return self.store[box].read().result()
        except Exception as error:  # storage raises what it likes on damage
            raise UserError(f"{self.path}: cannot be read ({_line(error)})") from None


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
