"""Plots of a sweep's rows, each an answer to one question; no jax.

  STEP_batch         time per token against batch, a line for each all-to-all
  STEP_mesh_layout   time per token by mesh and layout, as a map
  STEP_pareto        latency against cost; the front is what nobody beats in both
  STEP_collectives   time per token by form of the collective matmuls, as bars

Where other factors vary, each point is the fastest of them, and the subtitle says so. A plot whose question
the rows do not ask (one batch, one mesh …) is not made.

Data flow: rows → by step → the best row for each point → PNG.

Worked example: a grid of 4 all-to-alls × 6 batches of decode gives decode_batch.png and decode_pareto.png.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from inference_engine.profiling.figures import look, new_figure, plain_log_ticks, save
from inference_engine.profiling.rows import Row
from inference_engine.profiling.settings import Step
from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, Layout

_SHORT = {
    "mesh": "mesh", "layout": "layout", "attn_all_to_all": "all-to-all", "collectives": "collectives",
    "reduce_dtype": "sums", "weights": "weights", "activation_dtype": "activations", "batch": "batch",
    "context": "context",
}  # fmt: skip
_ORDERS: dict[str, Any] = {
    "layout": Layout, "attn_all_to_all": AttnAllToAll, "collectives": CollectiveMode,
}  # fmt: skip
_LABELLED = 6  # points of a Pareto front that carry their setting
_DARK = 0.55  # of the map's scale: beyond it the text is white


@dataclasses.dataclass(frozen=True)
class _Point:
    """A value in ms per token with its spread."""

    value: float
    low: float
    high: float


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Makes every plot that the measured rows have an answer for; returns their paths."""
    made = []
    for step in Step:
        of_step = [row for row in rows if row.timing is not None and row.setting["step"] == step.value]
        for name, draw in _PLOTS.items():
            figure = draw(of_step) if of_step else None
            if figure is not None:
                made.append(save(figure, folder / f"{step.value}_{name}.png"))
    return made


def point(row: Row) -> _Point:
    """A row's ms per token."""
    timing = row.timing
    assert timing is not None
    scale = row.figures["ms_per_token"] / timing.median
    return _Point(row.figures["ms_per_token"], timing.spread_low * scale, timing.spread_high * scale)


def subtitle(rows: Sequence[Row], shown: Sequence[str]) -> str:
    """Model and device, factors with one value, and factors of which the fastest is shown."""
    first = rows[0]
    values = {name: list(dict.fromkeys(str(row.setting[name]) for row in rows)) for name in _SHORT}
    fixed = [f"{_SHORT[name]} {found[0]}" for name, found in values.items() if len(found) == 1]
    best = [
        f"{len(found)} × {_SHORT[name]}"
        for name, found in values.items()
        if len(found) > 1 and name not in shown
    ]
    chips = max(_chips(row) for row in rows)
    model = f"{first.model['name']}, {first.model['parameters']:,} parameters"
    devices = "host devices" if first.device["platform"] == "cpu" else "devices"
    device = f"{first.device['kind']}, {chips} {devices}"
    lines = [f"{first.setting['step']} · {model} · {device}", " · ".join(fixed)]
    if best:
        lines.append(f"each point: the fastest of {', '.join(best)}")
    return "\n".join(lines)


def _chips(row: Row) -> int:
    x, y, z = map(int, row.setting["mesh"].split(","))
    return x * y * z


def _best(rows: Sequence[Row], key: Callable[[Row], Hashable]) -> dict[Any, Row]:
    """The fastest row for each key."""
    found: dict[Any, Row] = {}
    for row in rows:
        other = found.get(key(row))
        if other is None or row.figures["ms_per_token"] < other.figures["ms_per_token"]:
            found[key(row)] = row
    return found


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    """A factor's values: choices in the order of their enum, others by size."""
    order = [value.value for value in _ORDERS.get(name, ())]
    return sorted({row.setting[name] for row in rows}, key=order.index if order else None)


def _batch(rows: Sequence[Row]) -> Any:
    batches = _values(rows, "batch")
    if len(batches) < 2:
        return None
    best = _best(rows, lambda row: (row.setting["attn_all_to_all"], row.setting["batch"]))
    title = "Time per token against batch"
    figure, axes = new_figure(title, subtitle(rows, ("batch", "attn_all_to_all")))
    settings = _values(rows, "attn_all_to_all")
    for index, name in enumerate(settings):
        beside = 2 ** (0.06 * (index - (len(settings) - 1) / 2))  # so that equal times are seen apart
        points = {b: point(best[name, b]) for b in batches if (name, b) in best}
        values = [p.value for p in points.values()]
        errors = [
            [p.value - p.low for p in points.values()],
            [p.high - p.value for p in points.values()],
        ]
        style = look(index)
        axes.errorbar([b * beside for b in points], values, yerr=errors, label=name, capsize=3, markersize=5,
                      color=style.colour, marker=style.marker, linestyle=style.dash, linewidth=1.4,
                      elinewidth=0.8)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch (texts that are computed together)")
    axes.set_ylabel("ms per token of each text; bars: spread")
    axes.legend(title="all-to-all over", frameon=False)
    return figure


def _mesh_layout(rows: Sequence[Row]) -> Any:
    meshes, layouts = _values(rows, "mesh"), _values(rows, "layout")
    if len(meshes) < 2 and len(layouts) < 3:
        return None
    largest = max(_values(rows, "batch"))
    rows = [row for row in rows if row.setting["batch"] == largest]
    best = _best(rows, lambda row: (row.setting["mesh"], row.setting["layout"]))
    figure, axes = new_figure(
        "Time per token by mesh and layout", subtitle(rows, ("mesh", "layout")),
        max(5.5, 2.6 + 1.1 * len(layouts)), max(3.6, 2.2 + 0.42 * len(meshes)),
    )  # fmt: skip
    table = [[point(best[m, k]).value if (m, k) in best else float("nan") for k in layouts] for m in meshes]
    known = [value for line in table for value in line if value == value]
    least, most = 0.8 * min(known), max(known)
    shown = axes.imshow(table, cmap="Greys", aspect="auto", vmin=least, vmax=1.1 * most)
    for i, line in enumerate(table):
        for j, value in enumerate(line):
            dark = value == value and (value - least) / (1.1 * most - least) > _DARK
            text = f"{value:.2f}" if value == value else "–"
            weight = "bold" if value == min(known) else "normal"
            axes.text(j, i, text, ha="center", va="center", color="white" if dark else "black", weight=weight)
    axes.set_xticks(range(len(layouts)), layouts, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(meshes)), meshes)
    axes.set_xlabel("layout")
    axes.set_ylabel("mesh x,y,z")
    axes.grid(visible=False)
    figure.colorbar(shown, ax=axes, label="ms per token of each text")
    return figure


def _pareto(rows: Sequence[Row]) -> Any:
    if len(rows) < 3:
        return None
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.figures["ms_per_token"], _cost(row))):
        if not front or _cost(row) < _cost(front[-1]):
            front.append(row)
    varying = [name for name in _SHORT if len(_values(rows, name)) > 1]
    figure, axes = new_figure("Latency against cost", subtitle(rows, varying))
    places = {id(row): (row.figures["ms_per_token"], _cost(row)) for row in rows}
    axes.scatter(*zip(*places.values(), strict=True), s=18, color="#b5b5b5", label=f"{len(rows)} settings")
    axes.plot(*zip(*(places[id(row)] for row in front), strict=True), label="not beaten in both",
              color="#1b1b3a", marker="o", markersize=5, drawstyle="steps-post", linewidth=1.4)  # fmt: skip
    for number, row in enumerate(_spaced(front), 1):
        words = ", ".join(f"{_SHORT[name]} {row.setting[name]}" for name in varying)
        axes.annotate(str(number), places[id(row)], xytext=(5, 5), textcoords="offset points", weight="bold")
        axes.plot([], [], " ", label=f"{number}:  {words}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_log_ticks(axes.xaxis, axes.yaxis)
    axes.set_xlabel("latency: ms per token of each text")
    axes.set_ylabel("cost: chip-milliseconds per token")
    figure.legend(loc="outside lower left", frameon=False, fontsize=7.5)
    return figure


def _cost(row: Row) -> float:
    """Chip-milliseconds a token."""
    return 1e3 * float(row.figures["chip_seconds_per_token"])


def _spaced(front: Sequence[Row]) -> list[Row]:
    """At most `_LABELLED` of the points, the ends among them."""
    if len(front) <= _LABELLED:
        return list(front)
    places = [round(i * (len(front) - 1) / (_LABELLED - 1)) for i in range(_LABELLED)]
    return [front[place] for place in places]


def _collectives(rows: Sequence[Row]) -> Any:
    modes, meshes = _values(rows, "collectives"), _values(rows, "mesh")
    if len(modes) < 2:
        return None
    best = _best(rows, lambda row: (row.setting["mesh"], row.setting["collectives"]))
    figure, axes = new_figure("Time per token by collectives", subtitle(rows, ("mesh", "collectives")))
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        shift = (index - (len(modes) - 1) / 2) * width
        places = [i + shift for i, m in enumerate(meshes) if (m, mode) in best]
        points = [point(best[m, mode]) for m in meshes if (m, mode) in best]
        errors = [[p.value - p.low for p in points], [p.high - p.value for p in points]]
        style = look(index)
        axes.bar(places, [p.value for p in points], width, yerr=errors, label=mode, color=style.colour,
                 edgecolor="white", hatch=style.hatch, capsize=3,
                 error_kw={"elinewidth": 0.9, "ecolor": "#777777"})  # fmt: skip
    axes.set_xticks(range(len(meshes)), meshes)
    axes.set_xlabel("mesh x,y,z")
    axes.set_ylabel("ms per token of each text; bars: spread")
    axes.legend(title="collectives", frameon=False)
    return figure


_PLOTS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "batch": _batch,
    "mesh_layout": _mesh_layout,
    "pareto": _pareto,
    "collectives": _collectives,
}
