"""The parts of a step as bars, the collectives divided by the scope they come from; no jax.

Data flow: `StepProfile` → one figure → PNG.

Worked example: six bars, of which the collectives' has pieces of weights, attention, sampling and the rest.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.profiling.figures import look, new_figure, save
from inference_engine.profiling.step_parts import COLLECTIVES

if TYPE_CHECKING:
    from inference_engine.profiling.step_profile import StepProfile


def plot_step(found: "StepProfile", where: str, folder: Path) -> Path:
    """Makes the figure; `where` names model and device. Returns its path."""
    setting, made = found.setting, found.split
    figure, axes = new_figure(
        f"Where a {setting.step.value} step's time goes",
        f"{where}, mesh {setting.mesh}, layout {setting.layout.value}, all-to-all "
        f"{setting.attn_all_to_all.value}, {setting.collectives.value}\nbatch {setting.batch}, context "
        f"{setting.context}, weights {setting.weights}, activations {setting.activation_dtype} · traced: "
        f"mean of the chips' instructions, {1e3 * made.total:.2f} ms a step",
        height=3.6,
    )
    names = list(made.parts)
    for place, name in enumerate(names):
        if name != COLLECTIVES:
            axes.barh(place, 1e3 * made.parts[name], color="#5b7083", edgecolor="white")
            continue
        begin = 0.0
        for index, (scope, seconds) in enumerate(made.collectives.items()):
            style = look(index)
            axes.barh(place, 1e3 * seconds, left=begin, color=style.colour, hatch=style.hatch,
                      edgecolor="white", label=f"collectives of {scope}")  # fmt: skip
            begin += 1e3 * seconds
    for place, name in enumerate(names):
        words = f"  {made.parts[name] / made.total:.0%}"
        axes.text(1e3 * made.parts[name], place, words, va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("ms of one step on one chip")
    axes.legend(frameon=False, fontsize=8)
    return save(figure, folder / f"step_{setting.step.value}.png")
