"""A results file: whole rows, one a line, only ever added to.

A row is written at once and synced, so that a process that is killed leaves at most one half-written line,
the last; opening the file again cuts it off. Anything else that is no row (another program's file, another
schema) is refused and left as it is. Two sweeps into one file at once are refused as well.

Data flow: path → `Store.open` (rows that are there) → `add` a row → `close`.

Worked example: a file of 3 rows and `{"schema": 1, "conf` is opened as 3 rows, and the 18 bytes are gone.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from inference_engine.profiling.rows import SCHEMA, Row
from layers.errors import UserError

_BEGINNING = f'{{"schema": {SCHEMA}, "config": "'.encode()


class StoreError(Exception):
    """A row could not be written; the rows before it are whole."""


class Store:
    """An open results file; made by `Store.open`.

    Attributes:
      rows: what the file held when it was opened, and what was added since.
      dropped: bytes of a half-written row that opening cut off.
    """

    def __init__(self, path: Path, descriptor: int, rows: list[Row], dropped: int) -> None:
        self.path, self.rows, self.dropped = path, rows, dropped
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator["Store"]:
        """Opens or makes the file for a block.

        Raises UserError: it cannot be written, it is being written, or it holds something else than rows.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); allowed: a file's path") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"{path} is being written by another sweep; nearest: wait, or another file"
                ) from None
            rows, whole, dropped = _recovered(path, path.read_bytes(), "; nothing was changed")
            if dropped:
                os.ftruncate(descriptor, whole)
            yield cls(path, descriptor, rows, dropped)
        finally:
            os.close(descriptor)

    def add(self, row: Row) -> None:
        """Writes a row and syncs it; raises StoreError, after which the file ends with the row before."""
        data = row.to_line().encode()
        before = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror}); {len(self.rows)} rows in it are whole"
            ) from None
        self.rows.append(row)


def read_rows(path: Path) -> list[Row]:
    """The whole rows of a file that is only read; a half-written last one is left out.

    Raises UserError: it cannot be read, or holds something else than rows.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    return _recovered(path, data)[0]


def _recovered(path: Path, data: bytes, remark: str = "") -> tuple[list[Row], int, int]:
    """Rows, the bytes of whole lines, and the bytes of a half-written one after them."""
    whole = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            rows.append(Row.from_line(line.decode("utf-8", "replace")))
        except UserError as error:
            raise UserError(f"{path}: line {number} is {error}{remark}") from None
    tail = data[whole:]
    if not tail.startswith(_BEGINNING[: len(tail)]):
        raise UserError(f"{path}: its end is not a row of a sweep{remark}")
    return rows, whole, len(tail)
