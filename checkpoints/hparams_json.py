"""`HParams` as JSON and back, complete and strict.

The codec follows the dataclass's own annotations, so a field added there is stored with no change
here. Enums are stored by value, sets sorted, missing optional parts as null. A field that is not known,
or whose value has another type, is refused by name: a checkpoint written by a later version must not be
read as something else. A field that is absent takes its default, so that older files stay readable.

Worked example: `Rope(RopePairing.HALF, 10000.0)` is
{"pairing": "half", "theta": 10000.0, "rotary_dims": null, "xpos_scale_base": null, "scaling": null}.
"""

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from layers.errors import UserError
from layers.hparams import HParams


def hparams_to_json(hparams: HParams) -> dict[str, Any]:
    """Every field, in types that JSON has."""
    encoded = _encode(hparams)
    assert isinstance(encoded, dict)
    return encoded


def hparams_from_json(data: Any, source: str) -> HParams:
    """The inverse of `hparams_to_json`.

    Args:
      data: parsed JSON.
      source: the file's name, for messages.

    Raises UserError naming the field: unknown, of a wrong type, missing without a default, or values
    that no model has.
    """
    decoded = _decode(HParams, data, "hparams", source)
    assert isinstance(decoded, HParams)
    return decoded


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(_encode(item) for item in value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(annotation: Any, value: Any, name: str, source: str) -> Any:
    """A value of the annotated type from JSON."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = next(arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
        return _decode(inner, value, name, source)
    if origin in (tuple, frozenset):
        items = _expect(value, list, "a list", name, source)
        inner = typing.get_args(annotation)[0]
        return origin(_decode(inner, item, f"{name}[{i}]", source) for i, item in enumerate(items))
    if dataclasses.is_dataclass(annotation):
        return _decode_dataclass(annotation, value, name, source)
    if issubclass(annotation, enum.Enum):
        return _decode_enum(annotation, value, name, source)
    return _decode_scalar(annotation, value, name, source)


def _decode_dataclass(annotation: Any, value: Any, name: str, source: str) -> Any:
    data: Mapping[str, Any] = _expect(value, dict, "an object", name, source)
    hints = typing.get_type_hints(annotation)
    fields = {field.name: field for field in dataclasses.fields(annotation)}
    for key in data:
        if key not in fields:
            raise UserError(
                f"{source}: {name} has an unknown field {key[:60]!r}{_nearest(key, list(fields))}"
            )
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in data:
            raise UserError(f"{source}: {name} has no {key}")
    values = {key: _decode(hints[key], data[key], f"{name}.{key}", source) for key in data}
    try:
        return annotation(**values)
    except ValueError as error:
        raise UserError(f"{source}: {name} is impossible: {error}") from None


def _decode_enum(annotation: type[enum.Enum], value: Any, name: str, source: str) -> enum.Enum:
    allowed = [member.value for member in annotation]
    if value not in allowed:
        raise UserError(
            f"{source}: {name} is {value!r:.60}; allowed: {', '.join(allowed)}{_nearest(value, allowed)}"
        )
    return annotation(value)


def _decode_scalar(annotation: type, value: Any, name: str, source: str) -> Any:
    if annotation is float:
        number = value if isinstance(value, float) else _expect(value, int, "a number", name, source)
        if not math.isfinite(number):
            raise UserError(f"{source}: {name} is {number}, expected a finite number")
        return float(number)
    labels = {int: "an integer", bool: "true or false", str: "a text"}
    return _expect(value, annotation, labels[annotation], name, source)


def _expect(value: Any, kind: type, label: str, name: str, source: str) -> Any:
    """The value if it has this type; true and false are not integers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{source}: {name} is {value!r:.60}, expected {label}")
    return value


def _nearest(text: Any, allowed: list[str]) -> str:
    near = difflib.get_close_matches(str(text), allowed, n=1, cutoff=0.5)
    return f"; nearest: {near[0]}" if near else ""
