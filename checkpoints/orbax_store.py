"""The native checkpoint: the neutral state in Orbax, with its form and its tokenizer beside it.

    PATH/weights_0/ …     Orbax checkpoints (PyTree, OCDBT, zarr), a bounded number of bytes each
    PATH/tokenizer.model  the tokenizer, where there is one
    PATH/checkpoint.json  HParams and the list of the above

Save: the weights are written in groups, so that a lazy state never has more than one group in memory,
into `PATH.partial`, which is renamed to PATH when all is there. A killed save leaves no PATH, and what
it leaves beside does not load; a save that may be resumed goes on from the groups that are whole.

Restore: opening reads metadata only. Each weight is a lazy array over the stored chunks, so a loader
asks for the rectangle of each shard and gets just the chunks that it touches:

    jax.make_array_from_callback(weight.shape, sharding, lambda index: weight[index])

puts a weight straight into a sharding; no device, nor the host, ever holds the whole model.

Worked example: a float32 `layer_0/w0` [4096, 16384] is 256 MiB in chunks of at most 16 MiB. On a mesh of
8 chips with ff sharded, each chip's [4096, 2048] is read from the chunks that overlap it.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from checkpoints.lazy import ArrayLike, Box, LazyArray
from checkpoints.orbax_metadata import ITEM_PREFIX, METADATA_FILE, Metadata, item_bytes, read_metadata
from checkpoints.state import (
    CheckpointState,
    Entry,
    OpenedCheckpoint,
    QuantizedTensor,
    state_spec,
    validate_state,
)
from layers.errors import UserError

GROUP_BYTES = 1 << 30
CHUNK_BYTES = 1 << 24
_CACHE_BYTES = 1 << 26
PARTIAL = ".partial"
TOKENIZER_STEM = "tokenizer"
_RESUME = "resume.txt"
_UNFINISHED = (f"{ITEM_PREFIX}*.orbax-checkpoint-tmp", METADATA_FILE)
Progress = Callable[[int, int], None]


def _unseen(done: int, total: int) -> None:
    del done, total


_REPLACED = ".replaced"
_ARRAY_HEADER = b"/.zarray"


def save_checkpoint(
    path: Path | str,
    state: CheckpointState,
    tokenizer_file: Path | str | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    group_bytes: int = GROUP_BYTES,
    companions: Sequence[Path] = (),
    resume_as: str | None = None,
    progress: Progress = _unseen,
) -> None:
    """Save a model so that it appears whole or not at all.

    Args:
      path: the folder to make.
      state: weights in any array-like form; dtypes are kept, int8 kernels as value and scale.
      tokenizer_file: copied into the folder.
      extra: JSON to keep with the model.
      overwrite: replace a checkpoint that is there, the whole folder; anything else is never replaced.
      group_bytes: how many bytes of weights are in memory at a time (one weight at least).
      companions: files to copy into the folder beside the tokenizer, under their names.
      resume_as: what the weights are, in a text. A save that was interrupted leaves what it wrote, and one
        with the same text goes on from there; None for one that begins anew and leaves nothing.
      progress: called with bytes written and bytes in all.

    Raises UserError if the state is not a whole model, if the path is taken or cannot be written.
    """
    path = Path(path).absolute()
    validate_state(state, "the model to save")
    partial = path.with_name(path.name + PARTIAL)
    _check_target(path, overwrite)
    _check_partial(partial)
    try:
        _begin(partial, resume_as)
        items = _write_groups(partial, state, group_bytes, progress)
        tokenizer = None if tokenizer_file is None else _copy_tokenizer(Path(tokenizer_file), partial)
        for companion in companions:
            shutil.copyfile(companion, partial / companion.name)
        sizes = {item: item_bytes(partial / item) for item in items}
        Metadata(state.hparams, items, tokenizer, extra or {}, sizes).write(partial)
        (partial / _RESUME).unlink(missing_ok=True)
        _publish(partial, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        if resume_as is None:
            shutil.rmtree(partial, ignore_errors=True)


def _begin(partial: Path, resume_as: str | None) -> None:
    """Makes the folder to write into, or keeps the one that a save of the same weights left."""
    kept = partial / _RESUME
    if resume_as is not None and kept.is_file() and kept.read_text(encoding="utf-8") == resume_as:
        for name in (TOKENIZER_STEM, *_UNFINISHED):  # half-written files of the interrupted save
            for left in partial.glob(f"{name}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if resume_as is not None:
        kept.write_text(resume_as, encoding="utf-8")


def open_orbax(path: Path | str) -> OpenedCheckpoint:
    """Open a saved model; its weights are lazy arrays over the stored chunks.

    Raises UserError naming the file or the key: no checkpoint, truncated or damaged, of a later
    version, or weights that are not the model's. Damage to a weight's data is raised when it is read.
    """
    path = Path(path).absolute()
    metadata = read_metadata(path)
    tokenizer = None if metadata.tokenizer is None else path / metadata.tokenizer
    if tokenizer is not None and not tokenizer.is_file():
        raise UserError(f"{tokenizer}: missing, although {METADATA_FILE} names it")
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    leaves: dict[str, ArrayLike] = {}
    for item in metadata.items:
        _check_size(path / item, metadata.sizes.get(item))
        for key, leaf in _open_item(path / item, context).items():
            if key in leaves:
                raise UserError(f"{path / item}: {key} is there twice")
            leaves[key] = leaf
    state = CheckpointState(metadata.hparams, _join_int8(leaves))
    validate_state(state, str(path))
    return OpenedCheckpoint(str(path), state, tokenizer, metadata.extra)


def _check_size(item: Path, expected: int | None) -> None:
    """Refuse weights that are fewer or more bytes than were saved, before any is read."""
    if expected is None or not item.is_dir():
        return
    found = item_bytes(item)
    if found != expected:
        raise UserError(
            f"{item}: truncated or changed: {found:,} bytes in its files, {METADATA_FILE} says {expected}"
        )


def _check_target(path: Path, overwrite: bool) -> None:
    """Refuse to replace what was not asked to be replaced, or is no checkpoint."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{str(path)!a}: a path that is not UTF-8 cannot be written to") from None
    replaced = path.with_name(path.name + _REPLACED)
    if overwrite and replaced.exists() and not (replaced / METADATA_FILE).is_file():
        raise UserError(f"{replaced}: stands where the old checkpoint is moved aside, and is no checkpoint")
    if path.is_symlink():
        raise UserError(f"{path}: a link will not be replaced; name the folder, {path.resolve()}")
    if not path.exists():
        return
    if not overwrite:
        raise UserError(f"{path}: exists already; name a path that does not, or overwrite it")
    if not (path / METADATA_FILE).is_file():
        raise UserError(f"{path}: is no checkpoint and will not be overwritten")


def _check_partial(partial: Path) -> None:
    """Refuse to write over a folder that no interrupted save has left."""
    if not partial.is_dir():
        return
    names = [item.name for item in partial.iterdir()]
    foreign = [name for name in names if not name.startswith((ITEM_PREFIX, TOKENIZER_STEM))]
    if foreign and _RESUME not in names and METADATA_FILE not in names:
        raise UserError(f"{partial}: holds {min(foreign)!r}, which no save left; it will not be replaced")


def _groups(state: CheckpointState, group_bytes: int) -> Iterator[list[str]]:
    """Keys whose weights are written together, of bounded size."""
    keys: list[str] = []
    held = 0
    for key in state_spec(state.hparams):
        size = _size(key, state)
        if keys and held + size > group_bytes:
            yield keys
            keys, held = [], 0
        held += size
        keys.append(key)
    yield keys


def _size(key: str, state: CheckpointState) -> int:
    """Bytes of one entry as it is stored."""
    parts = _split_int8(key, state.weights[key]).values()
    return sum(math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in parts)


def _tree(keys: list[str], state: CheckpointState) -> dict[str, Any]:
    """The weights of a group, read now, as nested dicts of NumPy arrays."""
    tree: dict[str, Any] = {}
    for key in keys:
        for name, part in _split_int8(key, state.weights[key]).items():
            *folders, leaf = name.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = np.ascontiguousarray(part)
    return tree


def _split_int8(key: str, entry: Entry) -> dict[str, ArrayLike]:
    """The arrays that one entry is stored as."""
    if isinstance(entry, QuantizedTensor):
        return {f"{key}/qvalue": entry.qvalue, f"{key}/scale": entry.scale}
    return {key: entry}


def _join_int8(leaves: Mapping[str, ArrayLike]) -> dict[str, Entry]:
    """The entries that stored arrays stand for."""
    weights: dict[str, Entry] = {}
    for name, leaf in leaves.items():
        key, _, role = name.rpartition("/")
        if role == "qvalue" and f"{key}/scale" in leaves:
            weights[key] = QuantizedTensor(leaf, leaves[f"{key}/scale"])
        elif role != "scale" or f"{key}/qvalue" not in leaves:
            weights[name] = leaf
    return weights


def _write_groups(
    folder: Path, state: CheckpointState, group_bytes: int, progress: Progress
) -> tuple[str, ...]:
    """Write the weights as numbered Orbax checkpoints and return their names.

    Orbax renames each into place when it is whole, so one that is there already is.
    """
    import orbax.checkpoint as ocp  # takes most of a second, and only a save needs it

    names: list[str] = []
    done, total = 0, sum(_size(key, state) for key in state_spec(state.hparams))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        for number, keys in enumerate(_groups(state, group_bytes)):
            names.append(f"{ITEM_PREFIX}{number}")
            if not (folder / names[-1]).is_dir():
                tree = _tree(keys, state)
                save_args = _map_leaves(tree, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
                checkpointer.save(folder / names[-1], args=ocp.args.PyTreeSave(tree, save_args=save_args))
            done += sum(_size(key, state) for key in keys)
            progress(done, total)
    return tuple(names)


def _map_leaves(tree: Any, value: Any) -> Any:
    """The same nested dicts with this value at every leaf."""
    return {key: _map_leaves(node, value) for key, node in tree.items()} if isinstance(tree, dict) else value


def _copy_tokenizer(source: Path, folder: Path) -> str:
    name = f"{TOKENIZER_STEM}{source.suffix}"
    shutil.copyfile(source, folder / name)
    return name


def _publish(partial: Path, path: Path) -> None:
    """Rename into place; a checkpoint that was there is moved aside first and removed last."""
    replaced = path.with_name(path.name + _REPLACED)
    if not path.exists():
        partial.rename(path)
        return
    shutil.rmtree(replaced, ignore_errors=True)
    path.rename(replaced)
    try:
        partial.rename(path)
    except OSError:
        replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _open_item(item: Path, context: ts.Context) -> dict[str, LazyArray]:
    """The arrays of one Orbax checkpoint under flat keys.

    This reads the stores themselves and not the description that Orbax keeps beside them: what opens
    here is what will be read.
    """
    if not item.is_dir():
        raise UserError(f"{item}: missing, although {METADATA_FILE} names it")
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    try:
        stored = ts.KvStore.open(kvstore, context=context).result().list().result()
        names = [key.removesuffix(_ARRAY_HEADER).decode() for key in stored if key.endswith(_ARRAY_HEADER)]
        specs = [{"driver": "zarr", "kvstore": kvstore | {"path": f"{name}/"}} for name in names]
        opening = [ts.open(spec, read=True, context=context) for spec in specs]
        stores = {name: store.result() for name, store in zip(names, opening, strict=True)}
    except Exception as error:  # storage raises what it likes on damage
        raise UserError(f"{item}: damaged or not an Orbax checkpoint ({_first_line(error)})") from None
    return {name.replace(".", "/"): _lazy_array(item, name, store) for name, store in stores.items()}


def _lazy_array(item: Path, name: str, store: ts.TensorStore) -> LazyArray:
    """One stored array."""
    return LazyArray(tuple(store.shape), store.dtype.numpy_dtype, _StoredArray(item, name, store))


@dataclasses.dataclass(frozen=True, eq=False)
class _StoredArray:
    """Read a rectangle of one stored array."""

    item: Path
    name: str
    store: ts.TensorStore

    def __call__(self, box: Box) -> np.ndarray:
        try:
            return self.store[box].read().result()
        except Exception as error:  # storage raises what it likes on damage
            raise UserError(f"{self.item}: {self.name} cannot be read ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
