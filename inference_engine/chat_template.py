"""Chat templates: the text that a model was trained to see around a conversation.

A template comes with a checkpoint and is a program in Jinja, so it runs in Jinja's sandbox: it sees the
conversation and the names of BOS and EOS, can change nothing, and what it raises becomes one line.

Data flow: template, messages → `ChatTemplate.render` → text with names of special tokens → `encode_marked`.

Worked example: SmolLM2's template makes of "Hi" the text
"<|im_start|>system\\nYou are …<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n".
"""

import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from layers.errors import UserError

_MAX_TEXT = 1 << 24


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn: who ("system", "user" or "assistant") says what."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's template.

    Attributes:
      source: the file, for messages.
      text: the template.
      bos, eos: names of the tokens, empty where there is none.
    """

    source: str
    text: str
    bos: str = ""
    eos: str = ""

    def render(self, messages: Sequence[Message]) -> str:
        """The text that the model continues with its answer.

        Raises UserError with the template's own words where it refuses the conversation, and for a template
        that is damaged, unsafe, or makes no text.
        """
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise UserError(
                f"{self.source}: its chat template needs the package jinja2; pip install 'palm-inference[hf]'"
            ) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            rendered = environment.from_string(self.text).render(
                messages=[dataclasses.asdict(message) for message in messages],
                add_generation_prompt=True, bos_token=self.bos, eos_token=self.eos, tools=None,
            )  # fmt: skip
        except _RefusedError as error:
            raise UserError(f"{self.source}: the chat template says: {_line(error)}") from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError,
                AttributeError, MemoryError) as error:  # fmt: skip
            raise UserError(f"{self.source}: the chat template is unusable ({_line(error)})") from None
        if not rendered or len(rendered) > _MAX_TEXT:
            raise UserError(f"{self.source}: the chat template makes a text of {len(rendered):,} characters")
        return rendered


class _RefusedError(Exception):
    """A template's own refusal."""


def _refuse(message: Any) -> NoReturn:
    raise _RefusedError(str(message))


def _now(form: str) -> str:
    return dt.datetime.now(tz=dt.UTC).strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
