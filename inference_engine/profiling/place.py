"""Where a measurement runs: devices, versions, and what a chip can do.

Data flow: jax's devices → `find_chip`, or for a CPU a measurement of this one → `Place` → every row.

Worked example: 8 host devices of a CPU that reads 20 GB/s and multiplies at 100 GFLOP/s: each is bounded by
an eighth of both.
"""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax

from inference_engine.profiling.chips import ChipSpec, find_chip
from inference_engine.profiling.host_speed import MatmulSpeed, MemorySpeed

SAMPLES = 3  # of this CPU's speeds; the best counts
CPU = "cpu"
_PACKAGES = ("jax", "jaxlib")


@dataclasses.dataclass(frozen=True)
class Place:
    """Devices, the chip behind each, and versions."""

    platform: str
    kind: str
    count: int
    chip: ChipSpec
    versions: dict[str, str]

    def chip_of(self, chips: int) -> ChipSpec:
        """The chip as one of `chips` devices sees it: host devices share the machine."""
        return dataclasses.replace(self.chip, devices=chips) if self.platform == CPU else self.chip

    def device(self) -> dict[str, Any]:
        """What a row says of it."""
        return {
            "platform": self.platform,
            "kind": self.kind,
            "count": self.count,
            "chip": self.chip.to_json(),
        }


def versions() -> dict[str, str]:
    """Of Python and of what decides how fast a program is."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages}


def find_place(earlier: Sequence[dict[str, Any]] = ()) -> Place:
    """The devices that jax runs on. `earlier` rows' devices spare measuring the same CPU again."""
    device, count = jax.devices()[0], jax.device_count()
    kind = cpu_name() if device.platform == CPU else device.device_kind
    if device.platform != CPU:
        return Place(device.platform, kind, count, find_chip(kind), versions())
    known = [d["chip"] for d in earlier if (d["platform"], d["kind"]) == (CPU, kind)]
    chip = ChipSpec.from_json(known[-1]) if known else this_cpu(kind)
    return Place(CPU, kind, count, chip, versions())


def this_cpu(name: str) -> ChipSpec:
    """Measures this machine: memory speed with two threads, and large matmuls by dtype."""
    memory = MemorySpeed()
    matmuls = {dtype: MatmulSpeed(dtype) for dtype in ("float32", "bfloat16")}
    for _ in range(SAMPLES):
        memory.sample()
        for matmul in matmuls.values():
            matmul.sample()
    flops = {dtype: matmul.best for dtype, matmul in matmuls.items()}
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ChipSpec(name, flops, size, memory.best, source="measured here at first use")


def cpu_name() -> str:
    """The processor's own name and how many of its cores there are."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    except OSError:  # not Linux
        pass
    return f"{name}, {os.cpu_count()} CPUs"
