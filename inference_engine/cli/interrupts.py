"""Ctrl-C: what there is gets printed, one line says so, and the process ends at once.

Idea: raising `KeyboardInterrupt` is not enough here. It may surface inside a callback of an extension, which
swallows it; while a library is being imported, which reports something else; or half-way through a line of
output. And leaving in the usual way, with a program still being compiled in another thread, may crash. So
the handler raises nothing: it runs what has to be done before leaving (`closing`) and ends the process.
While a piece of output is being written (`held`) it waits for the end of that piece; a second Ctrl-C does
not wait.

Data flow: SIGINT → `_handle` → closers, newest first → "interrupted: …" on stderr → exit code 130.

Worked example: SIGINT arrives after 100 of a JSON object's 300 bytes. The other 200 are written, then the
process ends with "interrupted: 3 of 5 texts finished, 214 tokens generated".
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 130
Close = Callable[[], str]
"""Does what has to be done before the process ends; returns what to say of it, possibly nothing."""


class Interrupts:
    """The process's answer to SIGINT inside `taken`; outside the main thread nothing is taken.

    Attributes:
      leave: ends the process with a code.
    """

    def __init__(self, leave: Callable[[int], None] = os._exit) -> None:
        self.leave = leave
        self._closers: list[Close] = []
        self._holding = False
        self._noted = False
        self._ending = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the signal over for a block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def closing(self, close: Close) -> Iterator[None]:
        """Has `close` called if the block is interrupted."""
        self._closers.append(close)
        try:
            yield
        finally:
            self._closers.remove(close)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Puts an interrupt off until the end of the block."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._noted:
            self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._ending:
            self.leave(EXIT_CODE)
        elif self._holding and not self._noted:
            self._noted = True
        else:
            self._end()

    def _end(self) -> None:
        self._ending = True
        said = []
        for close in reversed(self._closers):
            # The reader of the output may be gone too, and nothing may keep the process from ending.
            with contextlib.suppress(Exception):
                said.append(close())
        words = "; ".join(filter(None, said))
        # Not through sys.stderr, in the middle of whose own write the signal may have come.
        with contextlib.suppress(OSError):
            os.write(2, ("interrupted" + (f": {words}" if words else "") + "\n").encode())
        self.leave(EXIT_CODE)
