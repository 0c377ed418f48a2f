"""What all plots share: a figure with a title that says what was measured where, readable in grey; no jax.

Nothing depends on colour alone: lines differ by marker and dash, bars by hatching, and the shades go from
dark to light. matplotlib is an extra, and its global state is not used.

Data flow: rows → a plot's own module → `new_figure`, `Look`s → `save` → a PNG.

Worked example: the third of four lines is mid-grey, dash-dotted, with triangles.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layers.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
_COLOURS = ("#1b1b3a", "#c0392b", "#2e86c1", "#e59866", "#58a55c", "#b0a8d9", "#8d6e63", "#9e9e9e")
_MARKERS = "os^DvPX*"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")


@dataclasses.dataclass(frozen=True)
class Look:
    """How one of several series looks."""

    colour: str
    marker: str
    dash: Any
    hatch: str


def look(index: int) -> Look:
    """The look of the index-th series; they repeat after eight."""
    i = index % len(_COLOURS)
    return Look(_COLOURS[i], _MARKERS[i], _DASHES[i], _HATCHES[i])


def check_plotting(folder: Path) -> None:
    """Makes the folder and finds out whether plots can be made.

    Raises UserError: matplotlib is not there, or the folder cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; allowed: pip install 'palm-inference[plots]', or no --plot")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--plot={folder} cannot be written ({error.strerror}); allowed: a folder") from None


def new_figure(title: str, subtitle: str, width: float = 7.5, height: float = 4.8) -> "tuple[Figure, Any]":
    """A figure with one pair of axes; the title says what is shown, the subtitle of what and where."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    axes = figure.add_subplot()
    axes.set_title(subtitle, fontsize=8, loc="left", color="#333333", wrap=True)
    axes.grid(visible=True, which="major", linewidth=0.4, color="#cccccc")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def plain_log_ticks(*axes: Any) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def save(figure: "Figure", path: Path) -> Path:
    """Writes a PNG; raises UserError where that fails."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error})") from None
    return path
