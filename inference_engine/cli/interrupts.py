"""Ctrl-C that never cuts a line of output in two.

Idea: an interrupt while a line is being written would leave half of it, and half a JSON object. So while
`Interrupts.held()` is open, the first signal is only noted and raised when the writing is done; a second one
is raised at once, so that a reader who never reads cannot hold the program.

Data flow: SIGINT → handler → `KeyboardInterrupt`, now or at the end of the `held` block.

Worked example: SIGINT arrives after 100 of an object's 300 bytes. The other 200 are written, then
`KeyboardInterrupt` is raised.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """A context that takes over SIGINT; outside the main thread, where no signal arrives, it does nothing."""

    def __init__(self) -> None:
        self._holding = False
        self._noted = False

    @contextlib.contextmanager
    def taken(self) -> Iterator["Interrupts"]:
        """Takes the signal over for a block."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Puts an interrupt off until the end of the block.

        Raises KeyboardInterrupt at the end if one came meanwhile.
        """
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._holding and not self._noted:
            self._noted = True
            return
        raise KeyboardInterrupt
