"""Bars of the collective matmuls: the forms side by side for each number of chips; no jax.

Data flow: `FormRow`s → one figure for each function, batch and dtypes → PNG.

Worked example: 2 functions at one batch in float32 are 2 figures of 3 groups (2, 4, 8 chips) of 6 bars.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.profiling.figures import look, new_figure, save

if TYPE_CHECKING:
    from inference_engine.profiling.collectives import FormRow
    from inference_engine.profiling.place import Place


def plot_collectives(rows: "Sequence[FormRow]", place: "Place", folder: Path) -> list[Path]:
    """Makes the figures; returns their paths."""
    groups: dict[Any, list[FormRow]] = {}
    for row in rows:
        groups.setdefault(dataclasses.replace(row.problem, chips=1), []).append(row)
    return [_figure(found, place, folder) for found in groups.values()]


def _figure(rows: "Sequence[FormRow]", place: "Place", folder: Path) -> Path:
    p = rows[0].problem
    what = "host devices" if place.platform == "cpu" else "chips"
    figure, axes = new_figure(
        f"{p.op.value}: time of one layer",
        f"[{p.batch}, {p.rows}] × [{p.rows}, {p.cols}] over all chips · weights {p.weights}, activations "
        f"{p.activation_dtype}, sums {p.reduce_dtype}\n{place.kind}, {what} · median of "
        f"{len(rows[0].timing.rounds)} rounds of {p.layers} layers; bars: spread",
    )
    forms = list(dict.fromkeys(row.form for row in rows))
    chips = sorted({row.problem.chips for row in rows})
    width = 0.84 / len(forms)
    for index, form in enumerate(forms):
        shift, style = (index - (len(forms) - 1) / 2) * width, look(index)
        found = {row.problem.chips: row.timing for row in rows if row.form == form}
        places = [i + shift for i, n in enumerate(chips) if n in found]
        medians = [1e6 * t.median for t in found.values()]
        errors = [
            [1e6 * (t.median - t.spread_low) for t in found.values()],
            [1e6 * (t.spread_high - t.median) for t in found.values()],
        ]
        axes.bar(places, medians, width, yerr=errors, label=form, color=style.colour, edgecolor="white",
                 hatch=style.hatch, capsize=2, error_kw={"elinewidth": 0.9, "ecolor": "#777777"})  # fmt: skip
    axes.set_xticks(range(len(chips)), [str(n) for n in chips])
    axes.set_xlabel(f"{what} on the axis")
    axes.set_ylabel("µs per layer")
    axes.legend(frameon=False, fontsize=8)
    dtypes = f"{p.weights}_{p.activation_dtype}_{p.reduce_dtype}"
    return save(figure, folder / f"{p.op.value}_batch{p.batch}_{dtypes}.png")
