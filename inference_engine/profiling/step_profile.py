"""A step of the engine, traced and split: where its time goes.

Data flow: `Setting` → `prepare` (the engine's own program) → rounds without a trace → one round under jax's
profiler → `traced_instructions` → `split` → `StepProfile`.

Worked example: a decode step of 8 texts on 8 host devices takes 20 ms; its instructions take 15 ms a device,
9 of them in collectives, most of which is waiting for devices that have no core at the moment.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from inference_engine.profiling.measure import Weights, prepare
from inference_engine.profiling.settings import Method, Setting, Step
from inference_engine.profiling.spread import Timing
from inference_engine.profiling.step_parts import Split, instructions, split, traced_instructions
from layers.errors import UserError


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """A traced step.

    Attributes:
      timing: seconds of one step, without the profiler.
      traced: seconds of one step under the profiler, which slows it.
      split: seconds of one chip's instructions.
      trace: the folder of the trace.
    """

    setting: Setting
    timing: Timing
    traced: float
    split: Split
    trace: Path

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {
            "setting": self.setting.to_json(),
            "timing": self.timing.to_json(),
            "traced_seconds": self.traced,
            "parts": self.split.parts,
            "collectives_by_scope": self.split.collectives,
            "top": list(self.split.top),
        }


def profile_step(weights: Weights, setting: Setting, method: Method, folder: Path) -> StepProfile:
    """Measures, traces into `folder` and splits.

    Raises UserError where something refuses the setting or the trace holds no instruction of the step.
    """
    subject = prepare(weights, setting, method)
    text = subject.program.executable.as_text()
    subject.run()
    timing = Timing.of([subject.run() for _ in range(method.rounds)])
    jax.profiler.start_trace(folder, create_perfetto_trace=True)
    try:
        traced = subject.run()
    finally:
        jax.profiler.stop_trace()
    steps = method.steps if setting.step is Step.DECODE else 1
    module = text.partition(",")[0].removeprefix("HloModule ").strip()
    events = traced_instructions(jax.profiler.ProfileData.from_file(str(_newest(folder))), module)
    made = split(instructions(text), events, steps * setting.mesh.size)
    if not made.total:
        raise UserError(f"the trace holds no instruction of {module}: this kind of device is not supported")
    return StepProfile(setting, timing, traced, made, folder)


def _newest(folder: Path) -> Path:
    """The trace that was written last; the profiler makes a folder for each."""
    return max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
