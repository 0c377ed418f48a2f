"""A terminal for tests: a stream that says it is one and keeps what was written.

Worked example: after `stdout = screen(monkeypatch)`, `print("x")` makes `stdout.getvalue()` "x\\n".
"""

import io
import sys

import pytest


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stdout from now on; pytest would replace one that a fixture sets."""
    fake = Terminal()
    monkeypatch.setattr(sys, "stdout", fake)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return fake
