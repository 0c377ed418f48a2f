"""stdout and stderr: styles where a terminal is, and nothing that a terminal would obey.

Idea: a model may generate any byte, an escape sequence included. On a terminal control characters are
shown as pictures; into a file or a pipe the text goes as it is.

Worked example: "a\\x1b[2J" is written to a terminal as "a␛[2J", to a pipe unchanged.
"""

import enum
import sys
from typing import Any

from inference_engine.cli.errors import OutputError

_KEPT = "\n\t"
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT}
_PICTURES |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


class Stream(enum.Enum):
    """One of the process's two outputs, whichever file it is now."""

    OUT = "stdout"
    ERR = "stderr"

    @property
    def file(self) -> Any:
        """The file object."""
        return getattr(sys, self.value)

    @property
    def is_terminal(self) -> bool:
        """Whether a person looks at what is written."""
        return bool(self.file.isatty())


def visible(text: str) -> str:
    """The text with control characters, save line breaks and tabs, as pictures of them."""
    return text.translate(_PICTURES)


def styled(text: str, style: str, stream: Stream) -> str:
    """The text with a style of rich's; as it is where the stream is no terminal."""
    if not text or not stream.is_terminal:
        return text
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream.file, highlight=False)
    with console.capture() as capture:
        console.print(Text(text, style=style), end="", soft_wrap=True)
    return capture.get()


def note(what: str, details: str, style: str) -> None:
    """One line on stderr, whatever the details hold: `what: details`, with `what` in a style."""
    line = " ".join(visible(details).split())
    colon = ": " if what and line else ""
    print(styled(what, style, Stream.ERR) + colon + line, file=sys.stderr, flush=True)


class Output:
    """stdout, written in whole pieces."""

    def __init__(self) -> None:
        self.terminal = Stream.OUT.is_terminal

    def write(self, text: str) -> None:
        """Writes a piece at once.

        Raises BrokenPipeError if the reader went away, OutputError if it cannot be written.
        """
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error) from None
