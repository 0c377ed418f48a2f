"""Files that a flag names, read whole; what cannot be read is one line.

Worked example: `read_file(Path("promts.jsonl"), "a JSONL file")` beside a prompts.jsonl raises "promts.jsonl:
no such file; nearest: ./prompts.jsonl".
"""

from pathlib import Path

from inference_engine.cli.flags import nearest
from layers.errors import UserError


def read_file(path: Path, expected: str) -> bytes:
    """The file's bytes.

    Raises UserError: there is no such file, or it is a folder instead of `expected`, or it cannot be read.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path}: a folder; expected {expected}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_neighbour(path)}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _neighbour(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return ""
    return nearest(path.name, names, f"{path.parent}/".replace("//", "/"))
