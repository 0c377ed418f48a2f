"""Files beside weights: JSON objects of bounded size, and links that stay inside.

Worked example: a `config.json` cut in the middle gives "…/config.json: truncated or not JSON (Unterminated
string starting at: line 4 column 3 (char 61))".
"""

import json
from pathlib import Path
from typing import Any

from layers.errors import UserError

_MAX_BYTES = 1 << 26
_BLOBS = "blobs"


def read_json_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """The object in a file.

    Raises UserError naming the file: missing, too large, not UTF-8, not JSON, a key twice, or no object.
    """
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= max_bytes else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if size > max_bytes:
        raise UserError(f"{path}: {size:,} bytes, expected at most {max_bytes:,}")
    try:
        data = json.loads(content, object_pairs_hook=_once)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: truncated or not JSON ({str(error).splitlines()[0][:100]})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a JSON {type(data).__name__}, expected an object")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"the key {key[:80]!r} is there twice")
        found[key] = value
    return found


def check_inside(file: Path) -> None:
    """Refuse a link that leads out of the file's folder, and a pipe or a device, which may never end.

    The Hugging Face hub's own cache is an exception: there `snapshots/REVISION/config.json` is a link into
    the folder `blobs` beside `snapshots`.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        raise UserError(f"{file}: a pipe, a socket or a device; expected a file")
    if not file.is_symlink():
        return
    folder, target = file.parent.resolve(), file.resolve()
    if target.parent not in (folder, folder.parent.parent / _BLOBS):
        raise UserError(f"{file}: a link out of its folder, to {target}; expected a file")
