"""Ctrl-C and progress: the process leaves at once, after what it has begun to write, and without a bar.

Worked example: a signal inside `held` is answered at the end of the block, a second one at once.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from inference_engine.cli import progress
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.progress import Unit, phase
from tests.cli_screen import Terminal, screen


class Left(BaseException):
    """Stands for the end of the process."""


def leave(code: int) -> None:
    raise Left(code)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs between two steps of the interpreter


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    taking = Interrupts(leave)
    with taking.taken():
        yield taking
    assert signal.getsignal(signal.SIGINT) is before


def left(action: Callable[[], None]) -> bool:
    """Whether the action ended the process, with the right code."""
    with pytest.raises(Left) as end:
        action()
    return end.value.args == (130,)


def test_an_interrupt_ends_the_process_with_one_line(
    interrupts: Interrupts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert left(interrupt)
    assert capfd.readouterr() == ("", "interrupted\n")


def test_what_has_to_be_done_is_done_first_newest_first(
    interrupts: Interrupts, capfd: pytest.CaptureFixture[str]
) -> None:
    done = []

    def closer(name: str, words: str) -> Callable[[], str]:
        return lambda: done.append(name) or words

    with interrupts.closing(closer("old", "1 of 2")), interrupts.closing(closer("new", "")):
        with interrupts.closing(closer("over", "never")):
            pass
        assert left(interrupt)
    assert done == ["new", "old"]
    assert capfd.readouterr().err == "interrupted: 1 of 2\n"


def test_nothing_keeps_the_process_from_ending(
    interrupts: Interrupts, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise BrokenPipeError

    with interrupts.closing(fail):
        assert left(interrupt)
    assert capfd.readouterr().err == "interrupted\n"


def test_an_interrupt_waits_for_the_end_of_a_write(interrupts: Interrupts) -> None:
    done = []

    def write() -> None:
        with interrupts.held():
            interrupt()
            done.append("written")
        done.append("never")

    assert left(write)
    assert done == ["written"]


def test_a_write_without_an_interrupt_goes_on(interrupts: Interrupts) -> None:
    with interrupts.held():
        pass
    assert left(interrupt)


def test_a_second_interrupt_does_not_wait(interrupts: Interrupts) -> None:
    done = []

    def write() -> None:
        with interrupts.held():
            interrupt()
            interrupt()
            done.append("never")

    assert left(write)
    assert done == []


def test_an_interrupt_while_it_is_ending_ends_it(interrupts: Interrupts) -> None:
    done = []

    def slow() -> str:
        done.append("begun")
        interrupt()
        done.append("never")
        return ""

    with interrupts.closing(slow):
        assert left(interrupt)
    assert done == ["begun"]


@contextlib.contextmanager
def started(label: str, unit: Unit = Unit.NOTHING, delay: float = 0.0) -> Iterator[progress.Update]:
    with phase(label, Interrupts(leave), unit, delay) as update:
        yield update


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_a_short_phase_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with started("compiling", delay=5.0) as update:
        update(1, 2)
    assert capsys.readouterr().err == ""


def test_a_long_phase_is_one_line_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    with started("compiling"):
        wait_for(lambda: error.getvalue() != "")
    assert error.getvalue() == "compiling …\n"


def test_a_phase_that_counts_says_so_every_few_seconds_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error, now = io.StringIO(), [100.0]
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress._Phase("loading weights", Unit.BYTES, every=10.0)
    shown.update(1_000_000, 17_300_000)  # too early to be shown
    now[0] += 2
    shown.show()
    for later in (1, 8, 1, 3, 7):  # seconds 3, 11, 12, 15, 22
        now[0] += later
        shown.update(int(now[0] - 100) * 700_000, 17_300_000)
    assert error.getvalue().splitlines() == [
        "loading weights … 1.0 of 17.3 MB, 2 s",
        "loading weights … 8.4 of 17.3 MB, 12 s",
        "loading weights … 15.4 of 17.3 MB, 22 s",
    ]


def test_a_long_phase_is_a_bar_with_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, error = screen(monkeypatch), Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    with started("loading weights", Unit.BYTES) as update:
        update(3_000_000, 17_300_000)
        wait_for(lambda: "loading weights" in error.getvalue())
        wait_for(lambda: "3.0/17.3 MB" in error.getvalue())
    assert stdout.getvalue() == ""  # stdout is for the result


def test_the_clock_of_a_phase_starts_with_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    screen(monkeypatch)
    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    with started("compiling", delay=1.1):
        wait_for(lambda: "0:00:01" in error.getvalue())
    assert "0:00:00" not in error.getvalue()


def test_a_phase_that_ended_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    error = io.StringIO()
    monkeypatch.setattr(sys, "stderr", error)
    ended = progress._Phase("compiling", Unit.NOTHING)
    ended.hide()
    ended.show()
    assert error.getvalue() == ""


def test_an_interrupt_takes_the_bar_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen(monkeypatch)
    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    hide_cursor, show_cursor = "\x1b[?25l", "\x1b[?25h"
    written = []

    def note_and_leave(code: int) -> None:
        written.append(error.getvalue())  # a process that ends like this writes nothing more
        leave(code)

    def work() -> None:
        with interrupts.taken(), phase("compiling", interrupts, delay=0.0):
            wait_for(lambda: hide_cursor in error.getvalue())
            interrupt()

    interrupts = Interrupts(note_and_leave)
    assert left(work)
    assert written[0].rindex(show_cursor) > written[0].rindex(hide_cursor)
