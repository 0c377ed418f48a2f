"""The metadata file of a native checkpoint: what is in the folder, and which model it is.

`checkpoint.json` is written last, so a folder without it is no checkpoint. It is versioned; a later
version, or a field that is not known, is refused by name.

Worked example:

    {"format": "neutral-state", "version": 1, "items": ["weights_0"], "tokenizer": "tokenizer.model",
     "hparams": {"layers": 3, ...}, "extra": {"steps": 9000}, "bytes": {"weights_0": 8573954}}
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.hparams_json import hparams_from_json, hparams_to_json
from layers.errors import UserError
from layers.hparams import HParams

ITEM_PREFIX = "weights_"
METADATA_FILE = "checkpoint.json"
FORMAT = "neutral-state"
VERSION = 1
_MAX_BYTES = 1 << 24
_FIELDS = ("format", "version", "items", "tokenizer", "hparams", "extra", "bytes")


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The content of the metadata file.

    Attributes:
      hparams: the model's form.
      items: names of the Orbax checkpoints in the folder that hold the weights.
      tokenizer: name of the tokenizer's file in the folder, if any.
      extra: what the saver wanted to keep.
      sizes: bytes of an item's files together; empty where an older saver did not say.
    """

    hparams: HParams
    items: tuple[str, ...]
    tokenizer: str | None
    extra: Mapping[str, Any]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "items": list(self.items),
            "tokenizer": self.tokenizer,
            "hparams": hparams_to_json(self.hparams),
            "extra": dict(self.extra),
            "bytes": dict(self.sizes),
        }
        text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        (folder / METADATA_FILE).write_text(text, encoding="utf-8")


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a native checkpoint.

    Raises UserError naming the file: missing, unreadable, not JSON, of a later version, with unknown
    fields or impossible values.
    """
    source = str(folder / METADATA_FILE)
    data = _read_json(folder / METADATA_FILE)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{source}: expected an object with format {FORMAT!r}")
    if data.get("version") != VERSION:
        raise UserError(
            f"{source}: version {data.get('version')!r} is not known; this program reads {VERSION}"
        )
    unknown = [key for key in data if key not in _FIELDS]
    if unknown:
        raise UserError(f"{source}: unknown field {unknown[0][:60]!r}; known: {', '.join(_FIELDS)}")
    hparams = hparams_from_json(data.get("hparams"), source)
    items, tokenizer, extra = data.get("items"), data.get("tokenizer"), data.get("extra", {})
    if not isinstance(items, list) or not items or not all(_is_item(item) for item in items):
        raise UserError(f"{source}: items is {items!r:.80}, expected names such as weights_0")
    if tokenizer is not None and not _is_plain_name(tokenizer):
        raise UserError(
            f"{source}: tokenizer is {tokenizer!r:.80}, expected the name of a file in the folder"
        )
    if not isinstance(extra, dict):
        raise UserError(f"{source}: extra is {extra!r:.80}, expected an object")
    sizes = data.get("bytes", {})
    if not isinstance(sizes, dict) or not all(item in items for item in sizes):
        raise UserError(f"{source}: bytes is {sizes!r:.80}, expected an object of sizes by item")
    return Metadata(hparams, tuple(items), tokenizer, extra, sizes)


def item_bytes(item: Path) -> int:
    """Bytes of all files of one Orbax checkpoint."""
    return sum(path.stat().st_size for path in item.rglob("*") if path.is_file())


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path}: {path.stat().st_size} bytes, expected at most {_MAX_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path.parent}: no {METADATA_FILE} in this folder; it is no saved checkpoint"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: truncated or not JSON ({str(error).splitlines()[0][:100]})") from None


def _is_item(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(rf"{ITEM_PREFIX}\d+", name) is not None


def _is_plain_name(name: Any) -> bool:
    """Whether this names a file in the folder itself and not somewhere else."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")
