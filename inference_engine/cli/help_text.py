"""Help as text: an overview of the commands, and for each command its flags by group.

Data flow: `Command` → paragraphs and two columns, wrapped to the terminal.

Worked example: at width 60 an option is

    --top_k K            keep the K most likely tokens
                         (-1 or 1 and above; default: -1)
"""

import textwrap
from collections.abc import Sequence

from inference_engine.cli.flags import usage
from inference_engine.cli.options import Command, Kind, Option

PROGRAM = "run_serving.py"
EXIT_CODES = (
    (0, "done"),
    (1, "it ran, and something differs or failed: unusable logits, output that cannot be written"),
    (2, "bad input: a flag, a prompt, a file, a checkpoint; one line on stderr says which"),
    (130, "interrupted with Ctrl-C; what was finished is printed"),
    (141, "the reader of the output went away, as with `| head`"),
)
_COLUMN = 27
MAX_WIDTH = 100


def overview(commands: Sequence[Command], width: int) -> str:
    """The help of the program itself."""
    rows = [(f"  {command.name}", command.summary) for command in commands]
    lines = [
        f"usage: {PROGRAM} COMMAND [flags]",
        "",
        *textwrap.wrap("Inference for PaLM-style language models in JAX.", width),
        "",
        "Commands:",
        *_rows(rows, width),
        "",
        f"{PROGRAM} COMMAND --help shows the flags of a command.",
        "",
        *_exit_codes(width),
    ]
    return "\n".join(lines)


def command_help(command: Command, width: int) -> str:
    """The help of one command."""
    lines = [f"usage: {PROGRAM} {usage(command)}"]
    for paragraph in command.description:
        lines += ["", *textwrap.wrap(" ".join(paragraph.split()), width)]
    for group in command.groups:
        lines += ["", f"{group.title}:"]
        lines += _rows([(f"  {_usage(option)}", _words(option)) for option in group.options], width)
    lines += ["", "Help:", *_rows([("  --help, -h", "show this and exit")], width)]
    if command.examples:
        lines += ["", "Examples:"]
    for comment, arguments in command.examples:
        lines += [f"  # {comment}", f"  python {PROGRAM} {command.name} {arguments}".rstrip()]
    return "\n".join([*lines, "", *_exit_codes(width)])


def _usage(option: Option) -> str:
    if option.kind is Kind.SWITCH:
        return f"--{option.name}"
    metavar = option.metavar or "|".join(option.choices) or option.kind.name
    return f"--{option.name} {metavar}"


def _words(option: Option) -> str:
    default = option.default_words
    notes = [
        option.allowed,
        "repeatable" if option.repeatable else "",
        f"default: {default}" if default else "",
    ]
    notes = [note for note in notes if note]
    return f"{option.help} ({'; '.join(notes)})" if notes else option.help


def _rows(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Two columns; a left part that is too long has a line of its own."""
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, max(20, width - _COLUMN))
        if len(left) > _COLUMN - 2:
            lines.append(left)
            left = ""
        for part in wrapped:
            lines.append(f"{left:<{_COLUMN}}{part}")
            left = ""
    return lines


def _exit_codes(width: int) -> list[str]:
    return ["Exit codes:", *_rows([(f"  {code}", words) for code, words in EXIT_CODES], width)]
