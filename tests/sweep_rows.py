"""Rows of sweeps that nobody measured, for tests of what is made of rows.

Worked example: `made_row(batch=4, seconds=2e-3)` is a decode step of 4 texts in 2 ms.
"""

import dataclasses
from typing import Any

from inference_engine.profiling.rows import Row, Status
from inference_engine.profiling.settings import Method, Setting, Step
from inference_engine.profiling.spread import Timing
from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape

SETTING = Setting(
    step=Step.DECODE,
    mesh=MeshShape(2, 2, 2),
    layout=Layout.WEIGHT_STATIONARY_2D,
    attn_all_to_all=AttnAllToAll.NONE,
    collectives=CollectiveMode.REFERENCE,
    reduce_dtype="float32",
    weights="float32",
    activation_dtype="float32",
    batch=2,
    context=16,
)
DEVICE = {"platform": "cpu", "kind": "a CPU", "count": 8, "chip": {"name": "a CPU"}}
VERSIONS = {"python": "3.11", "jax": "0.10.2", "jaxlib": "0.10.2"}


def made_row(status: Status = Status.OK, seconds: float = 1e-3, reason: str = "", **setting: Any) -> Row:
    """A row of this setting."""
    of = dataclasses.replace(SETTING, **setting)
    timing = Timing.of([seconds * (1 + i / 100) for i in range(-3, 4)]) if status is Status.OK else None
    tokens = of.batch if of.step is Step.DECODE else of.batch * of.context
    figures = {
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1e3 * seconds * of.batch / tokens,
        "chip_seconds_per_token": seconds * of.mesh.size / tokens,
        "memory_share": 0.5,
        "flops_share": None,
        "compile_seconds": 1.0,
        "run_seconds": 0.5,
    }
    return Row(
        setting=of.to_json(),
        model={"name": "tiny", "parameters": 1000},
        method=dataclasses.asdict(Method()),
        device=DEVICE,
        versions=VERSIONS,
        status=status,
        reason=reason,
        timing=timing,
        figures=figures if timing else {},
        started="2026-01-01T00:00:00+00:00",
    )
