"""What one chip can do, as data: the bounds that measured times are compared with; no jax.

The figures of accelerators are their makers' (Google Cloud's pages on v4, v5e, v5p, v6e and TPU7x; NVIDIA's
data sheets of the H100 and H200 in SXM form, without sparsity). A CPU has none: it is measured when it is
first needed (`this_cpu`). jax counts devices, which are not always chips: a TPU7x shows two, and a CPU as
many host devices as were asked for; `ChipSpec.per_device` is one device's part.

float32 has no matmul speed of its own on a TPU: XLA's default precision multiplies in bfloat16. On a GPU it
is that of TF32, which the default precision allows.

Data flow: a device's kind → `find_chip` → `ChipSpec`, overridden field by field where asked → bounds.

Worked example: a v5e reads 16 GB at 819 GB/s: a step that reads 8 GB cannot take less than 9.8 ms there.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layers.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class ChipSpec:
    """Figures of one chip; None where they are not known.

    Attributes:
      name: how people call it.
      flops: FLOP/s of matmuls by the dtype of their operands.
      memory_bytes, memory_speed: size in bytes, and bytes/s, of the memory that holds weights.
      links: links to neighbours; a switched network is one.
      link_speed: bytes/s of one link in one direction.
      devices: jax devices that share the chip.
      source: where the figures are from.
    """

    name: str
    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_bytes: int | None = None
    memory_speed: float | None = None
    links: int | None = None
    link_speed: float | None = None
    devices: int = 1
    source: str = ""

    def flops_of(self, dtype: str) -> float | None:
        """FLOP/s of one device for operands of a dtype."""
        whole = self.flops.get(dtype)
        return None if whole is None else whole / self.devices

    @property
    def device_memory_speed(self) -> float | None:
        """Bytes/s of one device when all of the chip's devices read."""
        return None if self.memory_speed is None else self.memory_speed / self.devices

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self.flops) or self.memory_speed is not None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return dataclasses.asdict(self) | {"flops": dict(self.flops)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ChipSpec":
        """The spec of an object as `to_json` makes it; missing fields are unknown."""
        return cls(**value)


def _tpu(bfloat16: float, int8: float) -> dict[str, float]:
    return {"bfloat16": bfloat16, "float32": bfloat16, "int8": int8}


_CLOUD = "Google Cloud TPU documentation"
_SHEET = "NVIDIA data sheet, SXM, dense"
_HOPPER = {"bfloat16": 989e12, "float32": 494e12, "int8": 1979e12}

CHIPS: dict[str, ChipSpec] = {
    spec.name: spec
    for spec in (
        ChipSpec("v4", _tpu(275e12, 275e12), 32 * GIB, 1228e9, 6, 50e9, source=_CLOUD),
        ChipSpec("v5e", _tpu(197e12, 393e12), 16 * GIB, 819e9, 4, 50e9, source=_CLOUD),
        ChipSpec("v5p", _tpu(459e12, 918e12), 95 * GIB, 2765e9, 6, 100e9, source=_CLOUD),
        ChipSpec("v6e", _tpu(918e12, 1836e12), 32 * GIB, 1638e9, 4, 100e9, source=_CLOUD),
        # No int8 figure is published; that of bfloat16 is a lower limit of it.
        ChipSpec("tpu7x", _tpu(2307e12, 2307e12), 192 * GIB, 7380e9, 6, 100e9, devices=2, source=_CLOUD),
        ChipSpec("H100", _HOPPER, 80 * 10**9, 3.35e12, 1, 450e9, source=_SHEET),
        ChipSpec("H200", _HOPPER, 141 * 10**9, 4.8e12, 1, 450e9, source=_SHEET),
    )
}

# What jax calls the devices; a name that is none of these is looked for by its beginning.
_KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x",
    "NVIDIA H100": "H100", "NVIDIA H200": "H200",
}  # fmt: skip
_VARIANTS = ("NVIDIA H100", "NVIDIA H200")
"""Kinds that go on: "NVIDIA H100 80GB HBM3"."""


def find_chip(kind: str) -> ChipSpec:
    """The chip that jax names `kind`; one that is not in the table has that name and no figures."""
    exact = kind if kind in _KINDS else next((name for name in _VARIANTS if kind.startswith(name)), None)
    return ChipSpec(kind, source="unknown kind of device") if exact is None else CHIPS[_KINDS[exact]]


def overridden(spec: ChipSpec, path: Path) -> ChipSpec:
    """The spec with the fields of a JSON object in a file.

    Raises UserError: no such file, no object, a field that is none, or a value that is no figure.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from None
    names = [field.name for field in dataclasses.fields(ChipSpec)]
    if not isinstance(value, dict) or not set(value) <= set(names):
        found = "no object" if not isinstance(value, dict) else ", ".join(sorted(set(value) - set(names)))
        raise UserError(f"{path}: {found}; allowed: an object with {', '.join(names)}")
    for name, figure in value.items():
        _check_figure(path, name, figure)
    flops = {**spec.flops, **value.get("flops", {})}
    return dataclasses.replace(spec, **{"source": str(path), **value, "flops": flops})


def _check_figure(path: Path, name: str, value: Any) -> None:
    if name in ("name", "source"):
        legal, wanted = isinstance(value, str), "a text"
    elif name == "flops":
        legal = isinstance(value, dict) and all(map(_positive, value.values()))
        wanted = 'positive numbers by dtype, such as {"bfloat16": 1.97e14}'
    else:
        legal, wanted = _positive(value), "a positive number"
    if not legal:
        raise UserError(f"{path}: {name}={json.dumps(value)[:60]}; allowed: {wanted}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
