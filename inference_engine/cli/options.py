"""What a command's flags are, as data: the one table that parsing, help and error messages read.

Idea: an `Option` says its name, kind, default and allowed values once. Options stand in groups, so that
several commands share them: a command is a name, a list of groups and a function.

Data flow: groups → `Command` → `flags.parse` → `Flags` → the command's function.

Worked example: `Option("top_k", "keep the K most likely tokens", Kind.INTEGER, default=-1)` is parsed from
`--top_k 40` or `--top_k=40`, is shown in the help with "default: -1", and `flags["top_k"]` is 40.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from inference_engine.cli.interrupts import Interrupts


class Kind(enum.Enum):
    """What a flag's value is; the enum's value is how messages name it."""

    TEXT = "a text"
    INTEGER = "an integer"
    NUMBER = "a number"
    CHOICE = "a choice"
    SWITCH = "true or false"


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag.

    Attributes:
      name: as typed after the two dashes.
      help: a phrase that completes "this flag is for …".
      kind: see `Kind`.
      default: the value where the flag is not given; a repeatable one's is always ().
      shown_default: how the help words the default, where `default` itself does not say it.
      allowed: the range in words, for the help.
      choices: the legal values of a CHOICE.
      metavar: the value's placeholder in the help.
      repeatable: whether it may be given several times; its value is a tuple then.
    """

    name: str
    help: str
    kind: Kind = Kind.TEXT
    default: Any = None
    shown_default: str = ""
    allowed: str = ""
    choices: tuple[str, ...] = ()
    metavar: str = ""
    repeatable: bool = False

    @property
    def default_words(self) -> str:
        """The default as the help shows it, empty for none."""
        if self.shown_default or self.default is None or self.kind is Kind.SWITCH or self.repeatable:
            return self.shown_default
        return str(self.default)


@dataclasses.dataclass(frozen=True)
class Group:
    """Flags that belong together and stand under one title in the help."""

    title: str
    options: tuple[Option, ...]


@dataclasses.dataclass(frozen=True)
class Flags:
    """The parsed flags of one call.

    Attributes:
      values: every option's value, given or default, and the operands by their names.
      given: names of the flags that were typed.
    """

    values: Mapping[str, Any]
    given: frozenset[str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
      name: what is typed; two words for a command under another one.
      summary: one line for the overview.
      description: paragraphs for the command's own help.
      groups: its flags.
      run: takes the flags and the answer to Ctrl-C, returns the exit code.
      examples: pairs of a comment and the arguments after the program's name.
      operands: names of the words that stand without a flag, all of them needed.
    """

    name: str
    summary: str
    description: tuple[str, ...]
    groups: tuple[Group, ...]
    run: Callable[[Flags, Interrupts], int]
    examples: tuple[tuple[str, str], ...] = ()
    operands: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """The flags of all groups."""
        return tuple(option for group in self.groups for option in group.options)
