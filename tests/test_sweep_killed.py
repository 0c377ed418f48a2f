"""A sweep of over a hundred cells that is killed twice ends with each row once and loses little time.

The first kill comes in the middle of a write, from inside it; the second comes from outside at any moment.
Takes minutes, of which compiling is nearly all.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from inference_engine.profiling.rows import Status
from inference_engine.profiling.store import read_rows
from tests.test_imports import REPO
from tests.tiny_checkpoint import save_tiny

CELLS = 160
LOST = 0.10
# Runs the command, and in the row with the number kills the process with half of it written.
_KILLED = """
import os, signal, sys
import run_serving
write, rows = os.write, 0
def counting(descriptor, data):
    global rows
    if not data.startswith(b'{"schema"'):
        return write(descriptor, data)
    rows += 1
    if rows == 60:
        write(descriptor, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data)
os.write = counting
run_serving.main(sys.argv[1:])
"""


@pytest.mark.long
def test_a_sweep_killed_twice_ends_with_each_row_once(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["sweep", "--checkpoint", str(save_tiny(tmp_path)), "--layout", "all", "--attn_all_to_all", "all",
             "--collectives", "reference,latency", "--step", "all", "--batch", "4", "--context", "16",
             "--out", str(out), "--json"]  # fmt: skip
    command = [sys.executable, str(REPO / "run_serving.py"), *words]
    first = subprocess.run(
        [sys.executable, "-c", _KILLED, *words], cwd=REPO, capture_output=True, timeout=1200
    )
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert not out.read_bytes().endswith(b"\n")
    second = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while out.read_bytes().count(b"\n") < 100:
        assert second.poll() is None
        time.sleep(0.2)
    os.kill(second.pid, signal.SIGKILL)
    assert b"repaired: " in second.communicate()[1]
    before = out.read_bytes()
    third = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1200)
    assert third.returncode == 0, third.stderr
    rows = read_rows(out)
    assert out.read_bytes().startswith(before)  # what was whole is as it was
    assert set(Counter(row.key for row in rows).values()) == {1}
    assert len(rows) == CELLS == len(third.stdout.splitlines())
    assert Counter(row.status for row in rows)[Status.FAILED] == 0
    assert {json.loads(line)["config"] for line in third.stdout.splitlines()} == {row.config for row in rows}
    _check_time(third.stderr)


def _check_time(err: str) -> None:
    """The last line says how long the sweep took, and how much of that was work."""
    print(err.splitlines()[-1])
    words = err.splitlines()[-1].split("measured now in ")[1].replace("(", "").replace(")", "").split()
    seconds = [float(word) for word in words if word.isdigit()]
    total, loading, compiling, running = seconds[:4]
    assert total - loading - compiling - running <= LOST * (compiling + running)
