"""From the words after a command to `Flags`: absl underneath, one `FlagValues` a command.

absl splits the words, knows `--name value`, `--name=value`, `--switch` and `--noswitch`; what is made of a
value, and every message, is this project's. absl's flag files and its list of flags to ignore are off: each
flag is applied or refused.

Data flow: `Command` → `FlagValues` → words → `Flags`, or a `UserError` that names the nearest legal flag
or value.

Worked example: `--temprature 1` gives "unknown flag --temprature of generate; nearest: --temperature", and
`--weights fp32` "--weights=fp32 is not known; allowed: float32, bfloat16, int8; nearest: float32".
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags as absl_flags

from inference_engine.cli.options import Command, Flags, Kind, Option
from layers.errors import UserError

HELP = "help"
_IGNORE_LIST = "undefok"  # absl would drop the flags that it lists without a word
_SHOWN = 60


def nearest(found: str, legal: Iterable[str], prefix: str = "") -> str:
    """The end of a message that names the closest legal word; empty where none is close."""
    close = difflib.get_close_matches(found.lower(), list(legal), n=1, cutoff=0.45)
    return f"; nearest: {prefix}{close[0]}" if close else ""


def shown(text: str) -> str:
    """A value as one short piece of a line."""
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def parse(command: Command, words: Sequence[str]) -> Flags | None:
    """The flags of a call, or None where help was asked for.

    Raises UserError: an unknown flag, a value of the wrong kind, a missing value, a flag given twice, a word
    that belongs to no flag, or one that is missing.
    """
    _refuse_ignore_list(command, words)
    values = _define(command)
    try:
        rest = values([command.name, *words])[1:]
    except _RefusedError as error:
        raise UserError(str(error)) from None
    except absl_flags.UnrecognizedFlagError as error:
        raise _unknown(command, error.flagname) from None
    except absl_flags.IllegalFlagValueError:
        raise _switch_with_a_value(command, words) from None
    except (absl_flags.Error, ValueError) as error:
        raise UserError(f"{command.name}: {shown(str(error))}") from None
    if values[HELP].value:
        return None
    if len(rest) < len(command.operands):
        raise UserError(f"{command.name}: no {command.operands[len(rest)]}; usage: {usage(command)}")
    if command.operands and len(rest) > len(command.operands):
        raise UserError(f"{command.name}: unexpected {shown(rest[-1])!r}; usage: {usage(command)}")
    if command.operands and "" in rest:
        raise UserError(
            f"{command.name}: {command.operands[rest.index('')]} is empty; usage: {usage(command)}"
        )
    if rest and not command.operands:
        hint = f"nearest: --prompt {shown(rest[0])!r}" if "prompt" in values else "it belongs to no flag"
        raise UserError(f"{command.name}: unexpected {shown(rest[0])!r}; {hint}")
    for option in command.options:
        if not option.repeatable and values[option.name].present > 1:
            raise UserError(f"--{option.name} is given {values[option.name].present} times; allowed: once")
    typed = frozenset(option.name for option in command.options if values[option.name].present)
    found = dict(zip(command.operands, rest, strict=True))
    return Flags({option.name: _value(option, values) for option in command.options} | found, typed)


def usage(command: Command) -> str:
    """A call of a command, as it is typed."""
    return " ".join((command.name, *command.operands, "[flags]"))


def _switch_with_a_value(command: Command, words: Sequence[str]) -> UserError:
    """Only switches are refused by absl itself; every other value has a parser of its own."""
    switches = {option.name for option in command.options if option.kind is Kind.SWITCH} | {HELP}
    typed = next(
        (word for word in words if word.lstrip("-").partition("=")[0] in switches and "=" in word), ""
    )
    name = typed.lstrip("-").partition("=")[0]
    return UserError(
        f"{shown(typed)}: --{name} is a switch and takes no value; allowed: --{name}, --no{name}"
    )


class _RefusedError(Exception):
    """A value of the wrong kind. No ValueError, so that absl hands it on as it is."""


class _Parser(absl_flags.ArgumentParser[Any]):
    """Makes an option's value of its text."""

    def __init__(self, option: Option) -> None:
        self._option = option

    def parse(self, argument: str) -> Any:
        """The value; raises `_RefusedError`."""
        return _PARSERS[self._option.kind](self._option, argument)


class _FlagValues(absl_flags.FlagValues):
    """Flags that come from the command line alone."""

    def read_flags_from_files(self, argv: Sequence[str], force_gnu: bool = True) -> list[str]:
        """The words as they are: there are no flag files."""
        del force_gnu
        return list(argv)


def _define(command: Command) -> absl_flags.FlagValues:
    values = _FlagValues()
    values.set_gnu_getopt(True)
    values[HELP] = absl_flags.BooleanFlag(HELP, False, "show this help", short_name="h")
    for option in command.options:
        if option.kind is Kind.SWITCH:
            values[option.name] = absl_flags.BooleanFlag(option.name, False, option.help)
            continue
        kind = absl_flags.MultiFlag if option.repeatable else absl_flags.Flag
        values[option.name] = kind(_Parser(option), None, option.name, None, option.help)
    return values


def _value(option: Option, values: absl_flags.FlagValues) -> Any:
    flag = values[option.name]
    if option.repeatable:
        return tuple(flag.value or ())
    return flag.value if flag.present else option.default if option.kind is not Kind.SWITCH else False


def _refuse_ignore_list(command: Command, words: Sequence[str]) -> None:
    for word in words:
        if word.startswith("-") and word.lstrip("-").partition("=")[0] == _IGNORE_LIST:
            raise _unknown(command, _IGNORE_LIST)


def _unknown(command: Command, name: str) -> UserError:
    legal = [option.name for option in command.options] + [HELP]
    close = nearest(name.replace("-", "_"), legal, "--")
    return UserError(
        f"unknown flag --{shown(name)} of {command.name}{close or f'; {command.name} --help lists them'}"
    )


def _text(option: Option, text: str) -> str:
    del option
    return text


def _integer(option: Option, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _RefusedError(f"--{option.name}={shown(text)} is not an integer{_range(option)}") from None


def _number(option: Option, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _RefusedError(f"--{option.name}={shown(text)} is not a number{_range(option)}") from None


def _choice(option: Option, text: str) -> str:
    if text in option.choices:
        return text
    allowed = ", ".join(option.choices)
    raise _RefusedError(
        f"--{option.name}={shown(text)} is not known; allowed: {allowed}{nearest(text, option.choices)}"
    )


def _range(option: Option) -> str:
    return f"; allowed: {option.allowed}" if option.allowed else ""


_PARSERS = {Kind.TEXT: _text, Kind.INTEGER: _integer, Kind.NUMBER: _number, Kind.CHOICE: _choice}
