"""One line of a results file: what a cell is, where it ran, and what came of it; no jax.

The schema is documented in docs/sweeping.md and its version is in every row. A row says enough of itself to
be compared with rows of another file, another machine or another year.

Data flow: `Setting` + where + outcome → `Row` → one line of JSON → `Row`.

Worked example: a decode step of 8 texts that takes 4 ms on 8 chips makes 2,000 tokens/s, 4 ms/token, and
costs 0.004 chip-seconds a token.
"""

import dataclasses
import enum
import json
from typing import Any

from inference_engine.profiling.settings import config_hash
from inference_engine.profiling.spread import Timing
from layers.errors import UserError

SCHEMA = 1


class Status(enum.Enum):
    """What became of a cell."""

    OK = "ok"
    ILLEGAL = "illegal"  # something refused the setting; `reason` is its own text
    FAILED = "failed"  # it should have run; `reason` is the error's own text


@dataclasses.dataclass(frozen=True)
class Row:
    """A cell's outcome.

    Attributes:
      setting: the factors' values by name.
      model: name and form of the model.
      method: rounds and steps of the timing.
      device: platform, kind and count of the devices, and the chip's figures (`ChipSpec`).
      versions: of Python, jax, jaxlib and this project.
      status, reason: see `Status`.
      timing: seconds of one decode step, or of one prefill of all prompts; None unless OK.
      figures: what follows from it and from sizes; see sweep.py.
      started: when, in UTC.
    """

    setting: dict[str, Any]
    model: dict[str, Any]
    method: dict[str, Any]
    device: dict[str, Any]
    versions: dict[str, str]
    status: Status
    reason: str = ""
    timing: Timing | None = None
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    started: str = ""

    @property
    def config(self) -> str:
        """Hash of what is measured: setting, model and method, wherever it runs."""
        return config_hash({"setting": self.setting, "model": self.model, "method": self.method})

    @property
    def key(self) -> tuple[str, ...]:
        """What makes a second measurement the same row: the config, the kind of device and the versions."""
        place = (self.device["platform"], self.device["kind"])
        return (self.config, *place, *(f"{name} {self.versions[name]}" for name in sorted(self.versions)))

    def to_line(self) -> str:
        """One line of JSON, ASCII, with its line break."""
        value = {
            "schema": SCHEMA,
            "config": self.config,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "status": self.status.value,
            "timing": None if self.timing is None else self.timing.to_json(),
        }
        return json.dumps(value, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Row":
        """The row of a line.

        Raises UserError: no JSON, not a row, or a row of another schema.
        """
        try:
            value = json.loads(line)
            schema, config = value["schema"], value["config"]
        except (ValueError, KeyError, TypeError):
            raise UserError("not a row of a sweep") from None
        if schema != SCHEMA:
            raise UserError(f"a row of schema {schema!r}; allowed: {SCHEMA}")
        try:
            fields = {field.name: value[field.name] for field in dataclasses.fields(cls)}
            timing = fields["timing"]
            fields["timing"] = None if timing is None else Timing.of(timing["rounds"])
            row = cls(**(fields | {"status": Status(fields["status"])}))
            same = row.config == config
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"not a row of a sweep ({type(error).__name__}: {error})") from None
        if not same:
            raise UserError(f"a row that was changed: its config is {row.config}, not {config}")
        return row
