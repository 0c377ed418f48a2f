"""What a request asks of the sampler, checked once.

`SamplingParams` is plain data without jax. Every value is checked in `__post_init__` against one table,
so that a value which gets past it is applied exactly as written: nothing is clamped and nothing is
ignored later on. What depends on the model's vocabulary is checked by `validate_for(vocab)`.

Data flow: command line or request → `SamplingParams` → `sampling_state.sampling_row` → one slot of the
decode state.

Worked example: `SamplingParams(temperature=0.8, top_k=40, seed=7)` is legal. `SamplingParams(top_k=0)`
raises `UserError("top_k=0 is not allowed; allowed: -1 (off) or 1 and above; nearest: -1")`, and
`SamplingParams(top_k=300).validate_for(256)` raises `"top_k=300 is not allowed; allowed: at most the
vocabulary, 256; nearest: 256"`.
"""

import dataclasses
import math
import numbers
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from layers.errors import UserError

MAX_LOGPROBS = 20
"""Most alternatives a token that a request may ask for."""

MAX_SAMPLES = 65_536
"""Most samples of one prompt: each has a host-side text stream of its own from the start."""

MAX_BIAS = 1e4
"""Largest finite logit bias: beyond it float32 sums lose the logits themselves."""

_MAX_INT = 2**31 - 1
_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class _Number:
    """Legal values of one numeric field: `low` to `high`, and possibly one `extra` value below `low`."""

    kind: type[int] | type[float]
    low: int | float
    high: int | float
    words: str
    extra: int | float | None = None
    low_excluded: bool = False
    smallest: float | None = None  # what to propose where `low` itself is excluded

    def allows(self, value: Any) -> bool:
        """Whether a value (not NaN) of the right type is legal."""
        above = value > self.low if self.low_excluded else value >= self.low
        return (above and value <= self.high) or value == self.extra

    def nearest(self, value: Any) -> Any:
        """The legal value to propose instead of `value`, which is not NaN."""
        if value > self.low:
            return min(value, self.high)
        low = self.low if self.smallest is None else self.smallest
        if self.extra is None:
            return low
        return self.extra if value <= self.extra or value - self.extra <= low - value else low


_PENALTY = _Number(float, -2.0, 2.0, "-2 to 2 (0 is off)")

_NUMBERS: dict[str, _Number] = {
    "temperature": _Number(float, 1e-6, 1e6, "0 (greedy) or 1e-06 to 1e+06", extra=0.0),
    "top_k": _Number(int, 1, _MAX_INT, "-1 (off) or 1 and above", extra=-1),
    "top_p": _Number(float, 0.0, 1.0, "above 0 up to 1 (1 is off)", low_excluded=True, smallest=1e-6),
    "min_p": _Number(float, 0.0, 1.0, "0 (off) to 1"),
    "repetition_penalty": _Number(float, 1e-4, 1e4, "0.0001 to 10000 (1 is off)"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "seed": _Number(int, 0, 2**64 - 1, "0 to 18446744073709551615 (64 bits, unsigned)"),
    "num_samples": _Number(int, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
    "max_new_tokens": _Number(int, 1, _MAX_INT, f"1 to {_MAX_INT}"),
}
_LOGPROBS = _Number(int, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS} alternatives a token")
_STOP_ID = _Number(int, 0, _MAX_INT, "token ids, 0 and above")
_BIAS = _Number(float, -MAX_BIAS, MAX_BIAS, f"-{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf to ban", extra=-math.inf)


@typing.no_type_check  # of what is passed in: __post_init__ answers it, with a message for people
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    The order of application is penalties, logit bias, temperature, top-k, top-p, min-p.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token (after penalties and bias).
      top_k: keep the k most likely tokens; -1 for off.
      top_p: keep the shortest run of most likely tokens with at least this share of what top-k left.
      min_p: keep tokens with at least this share of the most likely one's probability.
      repetition_penalty: tokens of prompt or output have positive logits divided, others multiplied by it.
      presence_penalty: subtracted once from tokens already in the output.
      frequency_penalty: subtracted once for every time that a token is in the output.
      logit_bias: token id → what to add to its logit; -inf bans the token.
      seed: the text depends on it, on the prompt and on the sample's number only.
      num_samples: independent samples of one prompt.
      max_new_tokens: the output's length at most.
      stop_ids: token ids that end the output, beside the end-of-sequence token.
      stop_strings: texts that end the output; they and what follows are not returned.
      logprobs: None for none; n for the chosen token's log-probability and the n most likely ones',
        under the model's own distribution (before penalties, bias and temperature).

    Raises:
      UserError: a value of the wrong type or out of range.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    seed: int = 0
    num_samples: int = 1
    max_new_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        checked: dict[str, Any] = {
            name: _number(name, getattr(self, name), rule, defaults[name]) for name, rule in _NUMBERS.items()
        }
        if self.logprobs is not None:
            checked["logprobs"] = _number("logprobs", self.logprobs, _LOGPROBS, None)
        checked["logit_bias"] = _logit_bias(self.logit_bias)
        checked["stop_ids"] = tuple(
            _number(f"stop_ids[{i}]", value, _STOP_ID, 0)
            for i, value in enumerate(_items("stop_ids", self.stop_ids, "a list of token ids"))
        )
        checked["stop_strings"] = _stop_strings(self.stop_strings)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.num_samples > 1 and self.greedy:
            raise _refusal(
                "num_samples", self.num_samples, "1 where temperature=0 (all samples would be equal)", 1
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def seed_words(self) -> tuple[int, int]:
        """The seed's low and high 32 bits."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32

    def validate_for(self, vocab: int) -> None:
        """Check what depends on the model: ids below `vocab`, top_k and logprobs at most `vocab`.

        Raises:
          UserError: a value that this vocabulary does not allow.
        """
        for name, value in (("top_k", self.top_k), ("logprobs", self.logprobs)):
            if value is not None and value > vocab:
                raise _refusal(name, value, f"at most the vocabulary, {vocab}", vocab)
        for name, ids in (("logit_bias", self.logit_bias), ("stop_ids", self.stop_ids)):
            for token in ids:
                if token >= vocab:
                    raise _refusal(f"{name} token", token, f"0 to {vocab - 1} (the vocabulary)", vocab - 1)
        if sum(value == -math.inf for value in self.logit_bias.values()) == vocab:
            raise UserError(
                f"logit_bias bans all {vocab} tokens; allowed: up to {vocab - 1}; nearest: one less"
            )


def _show(value: object) -> str:
    """A value as one short line."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integers of more than some thousand digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _refusal(name: str, found: object, allowed: str, nearest: object) -> UserError:
    """The one form of message that this module gives."""
    return UserError(f"{name}={_show(found)} is not allowed; allowed: {allowed}; nearest: {nearest}")


def _number(name: str, value: Any, rule: _Number, default: object) -> Any:
    """`value` as the plain int or float that `rule` asks for, or a `UserError`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    real = isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational)
    if not (whole or real) or value != value:
        raise _refusal(name, value, rule.words, default)
    plain = int(value) if whole else float(value)
    if (rule.kind is float or isinstance(plain, int)) and rule.allows(plain):
        return rule.kind(plain)
    raise _refusal(name, value, rule.words, rule.kind(rule.nearest(plain)))


def _items(name: str, value: object, words: str) -> Iterable[Any]:
    """`value` where it is a collection that is neither text nor a mapping."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    raise _refusal(name, value, words, f"[{_show(value)}]")


def _logit_bias(value: object) -> dict[int, float]:
    """A checked copy of a logit bias."""
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", value, "a mapping of token ids to numbers", {})
    return {
        _number("logit_bias token", token, _STOP_ID, 0): _number(f"logit_bias[{token}]", bias, _BIAS, 0.0)
        for token, bias in value.items()
    }


def _stop_strings(value: object) -> tuple[str, ...]:
    """Checked stop strings: non-empty texts that UTF-8 can hold."""
    texts = tuple(_items("stop_strings", value, "a list of non-empty texts"))
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise _refusal(f"stop_strings[{i}]", text, "a non-empty text", "no such entry")
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            raise _refusal(f"stop_strings[{i}]", text, "text without lone surrogates", "no such entry")
    return texts
