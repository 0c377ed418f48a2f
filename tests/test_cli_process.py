"""The command line as a process: signals, pipes, streams, and what it imports when.

The processes share a cache of compiled programs, so that only the first one compiles.

Worked example: SIGINT after the first characters of a long text ends the process with code 130 and one line.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_imports import HEAVY, REPO, run_python
from tests.tiny_checkpoint import save_tiny

DEFAULT = REPO / "checkpoints" / "default"
TIMEOUT = 300
LONG = ("--max_context", "16384", "--max_new_tokens", "16000", "--slots", "2", "--logit_bias", "257=-inf")


@dataclasses.dataclass(frozen=True)
class Shell:
    """Starts `generate` on the tiny checkpoint."""

    folder: Path

    def start(self, *words: str, command: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """A process with its streams as pipes."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        tiny = ("generate", "--checkpoint", str(self.folder / "tiny"), "--tokenizer", "bytes", *words)
        return subprocess.Popen(
            [sys.executable, str(REPO / "run_serving.py"), *(command or tiny)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | cache, cwd=self.folder, bufsize=0,
        )  # fmt: skip


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("shell")
    save_tiny(folder)
    return Shell(folder)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, list[str]]:
    """Exit code, the rest of stdout, and the lines of stderr that are no progress."""
    out, err = process.communicate(timeout=TIMEOUT)
    lines = [line for line in err.decode().splitlines() if not line.endswith(" …")]
    assert "Traceback" not in err.decode()
    return process.returncode, (out or b"").decode("utf-8", "replace"), lines


def test_an_interrupt_keeps_what_was_generated(shell: Shell) -> None:
    process = shell.start("--prompt", "A:\n", *LONG)
    assert process.stdout is not None
    shown = process.stdout.read(40).decode("utf-8", "replace")
    process.send_signal(signal.SIGINT)
    code, rest, lines = finish(process)
    assert code == 130
    assert (shown + rest).startswith("A:\n")
    assert (shown + rest).endswith("\n")
    assert len(lines) == 1
    assert lines[0].startswith("interrupted: 0 of 1 texts finished, ")


def test_interrupted_json_is_complete_objects(shell: Shell) -> None:
    path = shell.folder / "prompts.jsonl"
    path.write_text('{"prompt": "first", "max_new_tokens": 30}\n{"prompt": "second"}\n')
    process = shell.start("--prompts_file", str(path), "--json", *LONG)
    assert process.stdout is not None
    shown = process.stdout.read(1).decode()
    process.send_signal(signal.SIGINT)
    code, rest, lines = finish(process)
    assert code == 130
    (row,) = map(json.loads, (shown + rest).splitlines())
    assert (row["prompt"], row["completion_tokens"], row["finish_reason"]) == ("first", 30, "length")
    assert lines[-1].startswith("interrupted: 1 of 2 texts finished, ")


def test_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    process = shell.start("--prompt", "A:\n", *LONG)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    process.stdout = None
    code, _, lines = finish(process)
    assert (code, lines) == (141, [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only some systems have a device that is full")
def test_a_full_disk_is_one_line(shell: Shell) -> None:
    with open("/dev/full", "wb") as full:
        words = [sys.executable, str(REPO / "run_serving.py"), "generate", "--help"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written (No space left on device)\n"


@pytest.mark.skipif(not (DEFAULT / "checkpoint.json").exists(), reason="the default checkpoint is not here")
def test_without_a_flag_it_continues_a_prompt_of_its_own(shell: Shell) -> None:
    code, out, lines = finish(shell.start(command=("generate",)))
    assert code == 0
    prompt, _, text = out.partition("\n")
    assert prompt.isupper()
    assert len(text) > 100
    assert len(lines) == 1
    assert " ms/token" in lines[0]


def test_json_is_alone_on_stdout(shell: Shell) -> None:
    short = (*LONG[:2], *LONG[4:], "--max_new_tokens", "20")
    process = shell.start("--prompt", "é\n", "--num_samples", "2", "--json", *short)
    code, out, lines = finish(process)
    assert code == 0
    assert out.isascii()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == "é\n"
    assert len(lines) == 1


def test_what_needs_no_model_starts_no_jax() -> None:
    for words, code in ((["generate", "--help"], 0), (["generate", "--top_p", "3"], 2), (["genrate"], 2)):
        blocked = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
        done = run_python(f"{blocked}import run_serving\nsys.exit(run_serving.main({words!r}))")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
