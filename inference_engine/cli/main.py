"""Runs one command and turns its outcome into an exit code.

A user's mistake is one line on stderr; a reader that went away is silence; for Ctrl-C see interrupts.py. Any
other exception is a defect of this program and keeps its traceback.

Data flow: words → command → `flags.parse` → `Command.run` → exit code (see `help_text.EXIT_CODES`).

Worked example: `["genrate"]` prints "error: unknown command genrate; allowed: generate, check; nearest:
generate" and returns 2.
"""

import os
import shutil
import sys
from collections.abc import Sequence

from inference_engine.cli import flags
from inference_engine.cli.errors import OutputError
from inference_engine.cli.help_text import MAX_WIDTH, PROGRAM, command_help, overview
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.options import Command
from inference_engine.cli.terminal import Output, note
from layers.errors import UserError

FAILED = 1
BAD_INPUT = 2
READER_GONE = 141
_HELP_WORDS = ("--help", "-h", "help")


def main(commands: Sequence[Command], words: Sequence[str], interrupts: Interrupts) -> int:
    """Runs the command that the words name; returns the exit code."""
    try:
        return _dispatch(commands, words, interrupts)
    except UserError as error:
        note("error", str(error), "bold red")
        return BAD_INPUT
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except OutputError as error:
        _drop_output()
        note("error", str(error), "bold red")
        return FAILED


def _dispatch(commands: Sequence[Command], words: Sequence[str], interrupts: Interrupts) -> int:
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    if not words or words[0] in _HELP_WORDS:
        Output().write(overview(commands, width) + "\n")
        return 0
    command = _find(commands, words)
    parsed = flags.parse(command, words[len(command.name.split()) :])
    if parsed is None:
        Output().write(command_help(command, width) + "\n")
        return 0
    return command.run(parsed, interrupts)


def _find(commands: Sequence[Command], words: Sequence[str]) -> Command:
    names, word = [command.name for command in commands], words[0]
    for typed in (" ".join(words[:2]), word):
        if typed in names:
            return commands[names.index(typed)]
    if word.startswith("-"):
        raise UserError(
            f"{flags.shown(word)} stands before the command; allowed: {PROGRAM} COMMAND [flags], "
            f"with COMMAND one of {', '.join(names)}"
        )
    close = flags.nearest(word, names)
    raise UserError(f"unknown command {flags.shown(word)}; allowed: {', '.join(names)}{close}")


def _drop_output() -> None:
    """Lets nothing more be written to stdout, so that the interpreter's last flush does not fail."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file, as in a test
        return
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
