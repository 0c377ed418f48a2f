"""Chat templates: the text that a model was trained to see around a conversation.

A template comes with a checkpoint and is a program in Jinja, so it runs in Jinja's sandbox: it sees the
conversation and the names of BOS and EOS, can change nothing, and what it raises becomes one line. Its steps,
seconds and texts are bounded (`template_sandbox`).

Data flow: template, messages → `ChatTemplate.render` → text with names of special tokens → `encode_marked`.

Worked example: SmolLM2's template makes of "Hi" the text
"<|im_start|>system\\nYou are …<|im_end|>\\n<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n".
"""

import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from inference_engine.template_sandbox import bounded_text
from layers.errors import UserError


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
        that is damaged, unsafe, takes too much, or makes no text.
        """
        values = {
            "messages": [dataclasses.asdict(message) for message in messages], "add_generation_prompt": True,
            "bos_token": self.bos, "eos_token": self.eos, "tools": None,
        }  # fmt: skip
        try:
            functions = {"raise_exception": _refuse, "strftime_now": _now}
            rendered = bounded_text(self.text, values, {"tojson": _to_json}, functions)
        except ImportError:
            raise UserError(
                f"{self.source}: its chat template needs the package jinja2; pip install 'palm-inference[hf]'"
            ) from None
        except _RefusedError as error:
            raise UserError(f"{self.source}: the chat template says: {_line(error)}") from None
        except Exception as error:  # a program: it may raise anything, when it is compiled too
            raise UserError(f"{self.source}: the chat template is unusable ({_line(error)})") from None
        if not rendered:
            raise UserError(f"{self.source}: the chat template makes a text of 0 characters")
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
