"""A results file loses no whole row, whatever ends the process, and touches nothing that is not its own."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference_engine.profiling.rows import SCHEMA, Row, Status
from inference_engine.profiling.store import Store, StoreError, read_rows
from layers.errors import UserError
from tests.sweep_rows import made_row
from tests.test_imports import REPO

ROWS = [
    made_row(batch=1),
    made_row(Status.ILLEGAL, reason="no: \u00d7 \u201c"),
    made_row(Status.FAILED, reason="x"),
]


def write(path: Path, rows: list[Row] = ROWS) -> bytes:
    with Store.open(path) as store:
        for row in rows:
            store.add(row)
    return path.read_bytes()


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    data = write(tmp_path / "r.jsonl")
    assert read_rows(tmp_path / "r.jsonl") == ROWS
    assert data.count(b"\n") == 3
    assert data.isascii()
    assert all(json.loads(line)["schema"] == SCHEMA for line in data.splitlines())
    with Store.open(tmp_path / "r.jsonl") as store:
        assert store.rows == ROWS
        assert store.dropped == 0


def test_every_half_written_last_line_is_cut_off_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = write(path, ROWS[:2])
    line = ROWS[2].to_line().encode()
    for length in [*range(30), len(line) // 2, len(line) - 1]:
        path.write_bytes(whole + line[:length])
        assert read_rows(path) == ROWS[:2]
        with Store.open(path) as store:
            assert (store.rows, store.dropped) == (ROWS[:2], length)
            store.add(ROWS[2])
        assert path.read_bytes() == whole + line


def test_a_kill_in_the_middle_of_a_write_loses_that_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    code = f"""
import os, signal
from pathlib import Path
from inference_engine.profiling.store import Store
from tests.sweep_rows import made_row
write = os.write
def half(descriptor, data):
    write(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
with Store.open(Path({str(path)!r})) as store:
    store.add(made_row(batch=1))
    os.write = half
    store.add(made_row(batch=2))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    assert not path.read_bytes().endswith(b"\n")
    with Store.open(path) as store:
        assert store.rows == [made_row(batch=1)]
        assert store.dropped > 100


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"hello\n", "line 1 is not a row"),
        (b"hello", "its end is not a row"),
        (b'{"a": 1}\n', "line 1 is not a row"),
        (b"[1]\n", "line 1 is not a row"),
        (b'{"schema": 7, "config": "x"}\n', "line 1 is a row of schema 7; allowed: 1"),
        (b'{"schema": 1, "config": "x"}\n', "line 1 is not a row of a sweep"),
        (b"\x00\x00\x00", "its end is not a row"),
        (b"\xff\xfe\n", "line 1 is not a row"),
    ],
)  # fmt: skip
def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=found), Store.open(path):
        pass
    with pytest.raises(UserError, match=found):
        read_rows(path)
    assert path.read_bytes() == data


def test_a_row_that_was_edited_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(write(path).replace(b'"batch": 1,', b'"batch": 3,'))
    with pytest.raises(UserError, match="line 1 is a row that was changed"):
        read_rows(path)


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no" / "r.jsonl", "No such file")):
        with pytest.raises(UserError, match=reason), Store.open(path):
            pass
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Store.open(path), pytest.raises(UserError, match="being written by another sweep"), Store.open(path):
        pass


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 300:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:300])

    with Store.open(path) as store:
        store.add(ROWS[0])
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="No space left on device"):
            store.add(ROWS[1])
        assert path.read_bytes() == before
        monkeypatch.undo()
        store.add(ROWS[1])
    assert read_rows(path) == ROWS[:2]


def test_the_key_is_what_a_second_measurement_would_share() -> None:
    row = made_row()
    assert row.key == made_row(seconds=9.0).key
    assert row.key != made_row(batch=3).key
    assert row.config == made_row(Status.FAILED).config
