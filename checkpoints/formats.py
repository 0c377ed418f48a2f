"""From a path to an opened checkpoint: what kind of file this is, and who reads it.

Kinds are told by their first bytes and by what a folder holds, never by a file's ending. Everything
that cannot be read is refused in one line that says what it is and what would be accepted; nothing is
unpickled and no weight is read.

Data flow: path → `detect` → container → reader → `OpenedCheckpoint`.

Worked example: a file that starts with FF D8 FF is "a JPEG image"; one that starts with "PK" is a zip
file, and an `.npz` if it holds `.npy` members; a folder with checkpoint.json is a saved checkpoint, one with
config.json a Hugging Face model.
"""

import dataclasses
import difflib
import enum
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

from checkpoints.gguf_header import MAGIC
from checkpoints.gguf_source import read_gguf
from checkpoints.huggingface_folder import CONFIG, find_files, read_named
from checkpoints.leaves_source import MAGIC as LEAF_MAGIC
from checkpoints.leaves_source import read_leaves
from checkpoints.named_arrays import NamedArrays
from checkpoints.npz_source import read_npz
from checkpoints.orbax_metadata import METADATA_FILE
from checkpoints.orbax_store import PARTIAL, open_orbax
from checkpoints.readers import gguf_llama, t5x_palm
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.registry import find_reader
from checkpoints.safetensors_source import INDEX_SUFFIX, SUFFIX
from checkpoints.state import OpenedCheckpoint
from checkpoints.t5x_source import TREE_FILE, read_t5x
from checkpoints.torch_source import read_torch
from layers.errors import UserError

EXPECTED = (
    f"expected a folder with {METADATA_FILE} (a saved checkpoint), a Hugging Face folder (safetensors), "
    "a T5X folder, a GGUF file, a PyTorch .pt file, an .npz file of named tensors or PaLM-jax's leaves"
)


class Container(enum.Enum):
    """How weights are packed."""

    ORBAX = "a saved checkpoint (Orbax)"
    NPZ = "an .npz file of named tensors"
    HUGGING_FACE = "a Hugging Face model in safetensors"
    GGUF = "a GGUF file"
    TORCH = "a PyTorch file"
    T5X = "a T5X folder"
    LEAVES = "a list of NumPy arrays"


@dataclasses.dataclass(frozen=True)
class _Foreign:
    """A kind of file that is recognised only to be refused by name."""

    magic: bytes
    name: str


_ZIP_MAGIC = b"PK\x03\x04"
_FOREIGN_FILES = (
    _Foreign(b"\xff\xd8\xff", "a JPEG image"),
    _Foreign(b"\x89PNG\r\n\x1a\n", "a PNG image"),
    _Foreign(b"%PDF", "a PDF document"),
    _Foreign(b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    _Foreign(b"\x1f\x8b", "a gzip file"),
    _Foreign(b"\x80\x02", "a Python pickle, which is never loaded"),
    _Foreign(b"\x80\x03", "a Python pickle, which is never loaded"),
    _Foreign(b"\x80\x04", "a Python pickle, which is never loaded"),
    _Foreign(b"\x80\x05", "a Python pickle, which is never loaded"),
)
_FOREIGN_FOLDERS = (
    ("_CHECKPOINT_METADATA", f"an Orbax checkpoint without {METADATA_FILE}"),
    ("_METADATA", f"an Orbax checkpoint without {METADATA_FILE}"),
)


def open_checkpoint(path: Path | str, options: ReaderOptions | None = None) -> OpenedCheckpoint:
    """Open a checkpoint of any supported kind; its weights are lazy.

    Args:
      path: a folder or a file.
      options: what the file does not say; see `ReaderOptions`.

    Raises UserError in one line for anything that is no readable checkpoint, and for options that do
    not apply to it.
    """
    path, options = Path(path), options or ReaderOptions()
    container = detect(path)
    if container is Container.ORBAX:
        if options.gamma_offset is not None:
            raise UserError(
                f"{path}: a saved checkpoint already says how its norm gains act; drop gamma_offset"
            )
        _refuse_head_width(path, options)
        return dataclasses.replace(open_orbax(path), family=container.value)
    if container in (Container.GGUF, Container.T5X):
        _refuse_head_width(path, options)
    if container is Container.GGUF:
        return _open_gguf(path, options)
    if container is Container.T5X:
        return OpenedCheckpoint(str(path), t5x_palm.read(read_t5x(path), options), family="PaLM (T5X)")
    files = find_files(path) if container is Container.HUGGING_FACE else None
    named = _READ[container](path) if files is None else read_named(files, str(path))
    reader = find_reader(named)
    if not reader.asks_head_width:
        _refuse_head_width(path, options)
    tokenizer = None if files is None else files.tokenizer
    return OpenedCheckpoint(str(path), reader.read(named, options), tokenizer, family=reader.name)


def _refuse_head_width(path: Path, options: ReaderOptions) -> None:
    if options.dim_head is not None:
        raise UserError(f"{path}: this file already says how wide its heads are; drop dim_head")


_READ: dict[Container, Callable[[Path], NamedArrays]] = {
    Container.TORCH: read_torch,
    Container.NPZ: read_npz,
    Container.LEAVES: read_leaves,
}


def _open_gguf(path: Path, options: ReaderOptions) -> OpenedCheckpoint:
    """A GGUF file, which holds its tokenizer."""
    named = read_gguf(path)
    tokenizer = path if "tokenizer.ggml.model" in named.config else None
    return OpenedCheckpoint(str(path), gguf_llama.read(named, options), tokenizer, family="Llama (GGUF)")


def detect(path: Path) -> Container:
    """What kind of checkpoint is at a path.

    Raises UserError, saying what is there and what is expected, if it is none.
    """
    try:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder{_sibling(path)}; {EXPECTED}")
        return _detect_folder(path) if path.is_dir() else _detect_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _detect_folder(path: Path) -> Container:
    names = set(os.listdir(path))
    if path.name.endswith(PARTIAL):
        raise UserError(f"{path}: an unfinished save; {EXPECTED}")
    if METADATA_FILE in names:
        return Container.ORBAX
    if not names:
        raise UserError(f"{path}: an empty folder; {EXPECTED}")
    if TREE_FILE in names and (path / TREE_FILE).is_file():
        return Container.T5X
    if CONFIG in names or any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return Container.HUGGING_FACE
    kind = next(
        (name for file, name in _FOREIGN_FOLDERS if file in names), f"a folder without {METADATA_FILE}"
    )
    raise UserError(f"{path}: {kind}; {EXPECTED}")


def _detect_file(path: Path) -> Container:
    if not path.is_file():
        raise UserError(f"{path}: not a regular file; {EXPECTED}")
    with path.open("rb") as stream:
        head = stream.read(512)
    if not head:
        raise UserError(f"{path}: an empty file; {EXPECTED}")
    if head.startswith(_ZIP_MAGIC):
        return _detect_zip(path)
    if head.startswith(MAGIC):
        return Container.GGUF
    if head.startswith(LEAF_MAGIC):
        return Container.LEAVES
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return Container.HUGGING_FACE
    kind = next((foreign.name for foreign in _FOREIGN_FILES if head.startswith(foreign.magic)), None)
    raise UserError(f"{path}: {kind or _describe(head)}; {EXPECTED}")


def _detect_zip(path: Path) -> Container:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise UserError(f"{path}: a truncated or damaged zip file ({str(error)[:80]}); {EXPECTED}") from None
    if any(name.endswith("data.pkl") for name in names):
        return Container.TORCH
    if not any(name.endswith(".npy") for name in names):
        raise UserError(f"{path}: a zip file without NumPy arrays; {EXPECTED}")
    return Container.NPZ


def _describe(head: bytes) -> str:
    """Text or not, for a file of no known kind."""
    try:
        head[:400].decode("utf-8")
    except UnicodeDecodeError as error:
        # The cut at 400 bytes may split a character; anything earlier is no UTF-8.
        return "a text file" if error.start >= 397 else "a file of an unknown kind"
    return "a file of an unknown kind" if b"\0" in head else "a text file"


def _sibling(path: Path) -> str:
    """A hint at a similarly named neighbour."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; there is {path.parent / near[0]}" if near else ""
