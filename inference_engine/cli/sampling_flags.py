"""The sampling options once: as flags of a command and as keys of a prompts file's lines.

Idea: a flag, a key and a field of `SamplingParams` are three spellings of one setting, so one table holds
them. `SamplingParams` alone says what is legal; a message of its own is given the name that was typed.

Data flow: flags and lines → fields → `SamplingParams`.

Worked example: `--stop END --stop_id 3` and `{"prompt": "x", "stop": "END", "stop_id": 3}` both give
stop_strings=("END",), stop_ids=(3,).
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inference_engine.cli.flags import nearest, shown
from inference_engine.cli.options import Flags, Group, Kind, Option
from inference_engine.sampling_params import MAX_BIAS, MAX_LOGPROBS, SamplingParams
from layers.errors import UserError

Fields = Mapping[str, Any]
"""Values by field name of `SamplingParams`."""


def _as_is(value: Any) -> Any:
    return value


def _bias_from_json(value: Any) -> dict[int, float]:
    """JSON's keys are texts, and it has no infinity: "5" is the id 5, "-inf" bans it."""
    if not isinstance(value, dict):
        raise _wrong_kind("logit_bias", value, 'an object such as {"5": -1.5}')
    biases = {}
    for key, bias in value.items():
        if not key.isdecimal():
            raise _wrong_kind("logit_bias token", key, "token ids, 0 and above")
        name = f"logit_bias[{key}]"
        biases[int(key)] = -math.inf if bias == "-inf" else _of_kind(name, bias, Kind.NUMBER)
    return biases


def _of_kind(name: str, value: Any, kind: Kind) -> Any:
    """A JSON value as the kind that its flag has; raises UserError for another kind."""
    if kind is Kind.NUMBER and type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            raise _wrong_kind(name, value, "a number of usual size") from None
    if type(value) is {Kind.INTEGER: int, Kind.TEXT: str}.get(kind):
        return value
    raise _wrong_kind(name, value, kind.value)


def _wrong_kind(name: str, value: Any, allowed: str) -> UserError:
    return UserError(f"{name}={shown(json.dumps(value))} is not allowed; allowed: {allowed}")


def _bias_from_flags(texts: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            pair = int(token), float(bias)
        except ValueError:
            raise UserError(
                f"--logit_bias={shown(text)} is not id=value; nearest: --logit_bias 5=-1.5"
            ) from None
        if pair[0] in biases:
            raise UserError(f"--logit_bias is given twice for token {pair[0]}; allowed: once a token")
        biases[pair[0]] = pair[1]
    return biases


@dataclasses.dataclass(frozen=True)
class _Setting:
    """One setting: its flag, its field, and what does not follow from the flag's kind."""

    option: Option
    field: str = ""
    from_flags: Callable[[Any], Any] = _as_is
    from_json: Callable[[Any], Any] | None = None

    @property
    def field_name(self) -> str:
        """The field of `SamplingParams`; the flag's name unless another is given."""
        return self.field or self.option.name

    def read_json(self, value: Any) -> Any:
        """The field's value from a line's; one text or number stands for a list of one."""
        name, kind = self.option.name, self.option.kind
        if self.from_json is not None:
            return self.from_json(value)
        if not self.option.repeatable:
            return _of_kind(name, value, kind)
        items = value if isinstance(value, list) else [value]
        return tuple(_of_kind(f"{name}[{i}]", item, kind) for i, item in enumerate(items))


def _number(name: str, metavar: str, words: str, allowed: str) -> _Setting:
    return _Setting(Option(name, words, Kind.NUMBER, allowed=allowed, metavar=metavar))


def _integer(name: str, metavar: str, words: str, allowed: str) -> _Setting:
    return _Setting(Option(name, words, Kind.INTEGER, allowed=allowed, metavar=metavar))


_SETTINGS = (
    _integer("max_new_tokens", "N", "generate at most N tokens", "1 and above"),
    _number("temperature", "T", "divide the logits by T", "0 for the most likely token, or above"),
    _integer("top_k", "K", "keep the K most likely tokens", "1 and above; -1 is off"),
    _number("top_p", "P", "keep the most likely tokens that have a share P together", "above 0; 1 is off"),
    _number("min_p", "P", "keep tokens with a share P of the most likely one's", "up to 1; 0 is off"),
    _number(
        "repetition_penalty",
        "X",
        "divide positive logits of tokens of prompt and text by X, multiply negative ones",
        "0.0001 to 10000; 1 is off",
    ),
    _number("presence_penalty", "X", "subtract X from logits of tokens in the text", "-2 to 2; 0 is off"),
    _number(
        "frequency_penalty", "X", "subtract X for each time that a token is in the text", "-2 to 2; 0 is off"
    ),
    _Setting(
        Option(
            "logit_bias",
            "add X to the logit of token ID",
            allowed=f"-{MAX_BIAS:g} to {MAX_BIAS:g}; -inf bans it",
            metavar="ID=X",
            repeatable=True,
        ),
        from_flags=_bias_from_flags,
        from_json=_bias_from_json,
    ),
    _integer("seed", "S", "another seed, another text", "0 to 2^64 - 1"),
    _integer("num_samples", "N", "texts of each prompt", "1 and above"),
    _Setting(
        Option("stop", "end before this text", metavar="TEXT", repeatable=True),
        "stop_strings",
    ),
    _Setting(
        Option("stop_id", "end at this token id", Kind.INTEGER, metavar="ID", repeatable=True),
        "stop_ids",
    ),
    _integer(
        "logprobs",
        "N",
        "with --json: log-probabilities of each token and of the N most likely ones",
        f"0 to {MAX_LOGPROBS}",
    ),
)
_BY_NAME = {setting.option.name: setting for setting in _SETTINGS}


def sampling_group(defaults: SamplingParams) -> Group:
    """The flags of sampling, with these defaults."""
    shrinks = {"max_new_tokens": f"{defaults.max_new_tokens}, or what the context leaves"}
    options = []
    for setting in _SETTINGS:
        default = getattr(defaults, setting.field_name)
        words = shrinks.get(setting.option.name, "" if setting.option.repeatable else f"{default}")
        words = "none" if default is None else words
        options.append(dataclasses.replace(setting.option, shown_default=words))
    return Group("Sampling", tuple(options))


def fields_from_flags(flags: Flags) -> dict[str, Any]:
    """The fields that the typed flags set."""
    return {
        setting.field_name: setting.from_flags(flags[setting.option.name])
        for setting in _SETTINGS
        if setting.option.name in flags.given
    }


def fields_from_line(values: Mapping[str, Any], beside: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that a prompts file's line sets; the keys `beside` them are left out and named in messages.

    Raises UserError: a key that is not known, or a value of another kind than its flag's.
    """
    unknown = [key for key in values if key not in _BY_NAME]
    if unknown:
        legal = [*beside, *_BY_NAME]
        close = nearest(unknown[0], legal)
        raise UserError(f"unknown key {shown(unknown[0])!r}; allowed: {', '.join(legal)}{close}")
    return {_BY_NAME[key].field_name: _BY_NAME[key].read_json(value) for key, value in values.items()}


def sampling_params(fields: Fields, prefix: str = "") -> SamplingParams:
    """Checked parameters.

    Raises UserError that names the setting as it was typed, with `prefix` before it.
    """
    try:
        return SamplingParams(**fields)
    except UserError as error:
        raise renamed(error, prefix) from None


def renamed(error: UserError, prefix: str = "") -> UserError:
    """The error with a field's name at its start replaced by `prefix` and the name that was typed."""
    message = str(error)
    for setting in _SETTINGS:
        if message.startswith(setting.field_name):
            return UserError(prefix + setting.option.name + message[len(setting.field_name) :])
    return UserError(message)
