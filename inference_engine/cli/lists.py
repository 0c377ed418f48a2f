"""Lists as the value of one flag: `1,8,64`, or `all` for a factor that has a fixed set of values.

Worked example: `choices_of("weights", "int8,float32", WEIGHTS)` is ("int8", "float32").
"""

from collections.abc import Sequence

from inference_engine.cli.flags import nearest, shown
from layers.errors import UserError

ALL = "all"


def choices_of(name: str, text: str, legal: Sequence[str]) -> tuple[str, ...]:
    """The values that a flag lists; raises UserError for one that is none of the legal ones."""
    parts = [part.strip() for part in text.split(",")]
    if parts == [ALL]:
        return tuple(legal)
    for part in parts:
        if part not in legal:
            allowed = ", ".join((*legal, ALL))
            raise UserError(f"--{name}={shown(part)} is not known; allowed: {allowed}{nearest(part, legal)}")
    return tuple(parts)


def numbers_of(name: str, text: str) -> tuple[int, ...]:
    """The positive integers that a flag lists; raises UserError."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)):
            raise UserError(f"--{name}={shown(part)} is not a list of integers from 1; nearest: --{name} 1,8")
    return tuple(map(int, parts))
