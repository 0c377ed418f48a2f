"""Prompts in: `--prompt` flags and the lines of a JSONL file, each with its own sampling.

Idea: a bad line is found before anything heavy starts. One bad line stops everything, unless bad lines are
to be skipped; then each is named on stderr, and the other prompts keep their numbers.

Data flow: flags, bytes of the file → `Prompt`s and `BadLine`s → (tokenizer) → requests.

Worked example: the lines `{"prompt": "KING.", "seed": 3}`, an empty one and `{"promt": "x"}` give one prompt,
index 0, and the bad line 3: unknown key 'promt' … nearest: prompt. `{"chat": "Who wrote Hamlet?", "system":
"Be brief."}` is a question to answer, as the flags of these names are.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from inference_engine.cli.files import read_file
from inference_engine.cli.flags import shown
from inference_engine.cli.sampling_flags import Fields, fields_from_line, sampling_params
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import check_text, text_from_bytes
from layers.errors import UserError

_BOM = b"\xef\xbb\xbf"
_TEXT_KEY, _CHAT_KEY, _SYSTEM_KEY = "prompt", "chat", "system"
_OWN_KEYS = (_TEXT_KEY, _CHAT_KEY, _SYSTEM_KEY)
_JSON_NAMES = {list: "an array", str: "a text", bool: "a boolean", int: "a number", float: "a number"}


@dataclasses.dataclass(frozen=True)
class Chat:
    """That a prompt is a user's turn; `system` is what stands before it, None for the model's own."""

    system: str | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt to continue.

    Attributes:
      index: its place among all that were given, skipped ones included, from 0.
      name: how messages call it.
      params: how to sample; max_new_tokens may still shrink where `sized` is false.
      sized: whether max_new_tokens was asked for.
      skippable: whether it is a line of a file.
      chat: the conversation around the text, if it is a question to answer.
    """

    index: int
    name: str
    text: str
    params: SamplingParams
    sized: bool
    skippable: bool = False
    chat: Chat | None = None


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot run, and why, in one line."""

    reason: str


def prompts_from_flags(
    texts: Sequence[str], fields: Fields, sized: bool, chats: Sequence[str] = (), system: str | None = None
) -> list[Prompt]:
    """The prompts of `--prompt` and `--chat` flags; `fields` are the sampling settings of all.

    Raises UserError: settings or a text that cannot run.
    """
    params = sampling_params(fields, "--")
    given = [(text, None) for text in texts] + [(text, Chat(system)) for text in chats]
    names = ["the prompt"] if len(given) == 1 else [f"prompt {i}" for i in range(1, len(given) + 1)]
    if system is not None:
        text_from_bytes(system.encode("utf-8", "surrogateescape"), "the system message")
    prompts = []
    for index, (name, (text, chat)) in enumerate(zip(names, given, strict=True)):
        # Bytes of the command line that are no UTF-8 arrive as surrogates; this tells which byte it is.
        text_from_bytes(text.encode("utf-8", "surrogateescape"), name)
        _check_prompt(text, name)
        prompts.append(Prompt(index, name, text, params, sized, chat=chat))
    return prompts


def read_prompts_file(path: Path, fields: Fields, sized: bool, first: int) -> list[Prompt | BadLine]:
    """The lines of a JSONL file; blank ones count as lines and hold nothing.

    Args:
      path: the file.
      fields: sampling settings, which a line may override.
      sized: whether max_new_tokens is among the settings that were asked for.
      first: the index of the first prompt.

    Raises UserError: the file cannot be read or holds no lines.
    """
    found: list[Prompt | BadLine] = []
    for number, line in enumerate(read_file(path, "a JSONL file").removeprefix(_BOM).split(b"\n"), 1):
        if not line.strip():
            continue
        name, index = f"{path} line {number}", first + len(found)
        try:
            text, own, chat = _parse_line(text_from_bytes(line, "it"))
            params = sampling_params({**fields, **own})
        except UserError as error:
            found.append(BadLine(f"{name}: {error}"))
            continue
        own_size = sized or "max_new_tokens" in own
        found.append(Prompt(index, name, text, params, own_size, skippable=True, chat=chat))
    if not found:
        raise UserError(f'{path}: no prompts in it; expected lines such as {{"prompt": "…"}}')
    return found


def keep_good(found: Sequence[Prompt | BadLine]) -> list[Prompt]:
    """All of them as prompts; raises UserError with the first bad line and the number of others."""
    bad = [line for line in found if isinstance(line, BadLine)]
    if bad:
        others = f"; {len(bad) - 1} more bad" if len(bad) > 1 else ""
        raise UserError(f"{bad[0].reason}{others}; nothing ran; --skip_bad_lines runs the good lines")
    return [prompt for prompt in found if isinstance(prompt, Prompt)]


def _parse_line(line: str) -> tuple[str, dict[str, Any], Chat | None]:
    """The prompt, the fields that a line sets, and its conversation if it has one; raises UserError."""
    try:
        value = json.loads(line, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise UserError("not JSON (nested too deep)") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"not JSON ({shown(str(error))}): {shown(line)}") from None
    if not isinstance(value, dict):
        kind = _JSON_NAMES.get(type(value), "null")
        raise UserError(f'{kind}; expected an object such as {{"prompt": "…"}}')
    own = fields_from_line({key: item for key, item in value.items() if key not in _OWN_KEYS}, _OWN_KEYS)
    if _CHAT_KEY not in value and _SYSTEM_KEY in value:
        raise UserError(f'"{_SYSTEM_KEY}" is about a chat; nearest: a key "{_CHAT_KEY}"')
    if (_TEXT_KEY in value) == (_CHAT_KEY in value):
        found = "both keys" if _TEXT_KEY in value else "no key"
        raise UserError(f'{found} "{_TEXT_KEY}" {"and" if _TEXT_KEY in value else "or"} "{_CHAT_KEY}"')
    key = _TEXT_KEY if _TEXT_KEY in value else _CHAT_KEY
    text, system = _text(value, key), _text(value, _SYSTEM_KEY) if _SYSTEM_KEY in value else None
    _check_prompt(text, f"its {key}")
    return text, own, Chat(system) if key == _CHAT_KEY else None


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise UserError(f'"{key}" is {_JSON_NAMES.get(type(text), "no text")}; expected a text')
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that is there twice one value would be ignored."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UserError(f"the key {shown(twice)!r} is there twice")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise UserError(f"{name} is not JSON; allowed: finite numbers")


def _check_prompt(text: str, name: str) -> None:
    if not text:
        raise UserError(f"{name} is empty; it needs at least one character")
    try:
        check_text(text)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
