"""The flags that say what a sweep measures: lists of values for each factor, or a grid by name; no jax.

A flag beside --grid exchanges that factor of the grid. "all" stands for every value of a factor that has a
fixed set of them, and a number for every mesh of that many chips.

Data flow: flags, grids by name → `grid_of` → `Grid`.

Worked example: `--mesh 2,2,2 --mesh 4,2,1 --attn_all_to_all all --batch 1,8` is a grid of 2 × 2 × 4 × 2
cells, 2 of them for the two layouts.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from inference_engine.cli.flags import nearest, shown
from inference_engine.cli.lists import ALL, choices_of, numbers_of
from inference_engine.cli.mesh_flags import CUBE, MESH
from inference_engine.cli.model_flags import ACTIVATIONS, WEIGHTS
from inference_engine.cli.options import Flags, Group, Option
from inference_engine.profiling.settings import Grid, Step
from layers.collectives.mode import REDUCE_DTYPES, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout
from layers.mesh_shape import MeshShape, legal_shapes

MODULE = "configs.sweeps"
MOST_CHIPS = 16384
GridMaker = Callable[[], Grid]

# Legal texts of each factor that has a fixed set of them, and what a text becomes.
_ENUMS: dict[str, Any] = {
    "layout": Layout, "attn_all_to_all": AttnAllToAll, "collectives": CollectiveMode, "step": Step,
}  # fmt: skip
DTYPES = {"reduce_dtype": REDUCE_DTYPES, "weights": WEIGHTS, "activation_dtype": ACTIVATIONS}
_NUMBERS = ("batch", "context")
_HELP = {
    "layout": "layouts",
    "attn_all_to_all": "mesh axes that attention splits the batch over",
    "collectives": "forms of the collective matmuls",
    "step": "programs that are timed",
    "reduce_dtype": "dtypes of the partial sums that travel",
    "weights": "how kernels are held",
    "activation_dtype": "dtypes of activations and cache",
    "batch": "texts that are computed together",
    "context": "tokens in the cache when a decode step begins, or of a prompt that is prefilled",
}


def grid_group(grids: Mapping[str, GridMaker]) -> Group:
    """The flags."""
    defaults = Grid(mesh=(MeshShape.parse(CUBE),))
    grid = Option(
        "grid", "a grid by name, or the function of a module of yours that returns one",
        metavar="[MODULE:]NAME", allowed=", ".join(grids),
    )  # fmt: skip
    mesh = Option(
        MESH, "chips along x, y and z, or a number for every mesh of so many chips", metavar="X,Y,Z|N",
        repeatable=True, shown_default=CUBE,
    )  # fmt: skip
    lists = [
        Option(name, _HELP[name], metavar="A,B,…", shown_default=_list(getattr(defaults, name)),
               allowed=", ".join((*legal, ALL)) if (legal := _legal(name)) else "integers from 1")
        for name in _HELP
    ]  # fmt: skip
    return Group("What is measured", (grid, mesh, *lists))


def grid_of(flags: Flags, grids: Mapping[str, GridMaker]) -> Grid:
    """The grid that the flags ask for.

    Raises UserError: no such grid, no such value, or a grid without cells.
    """
    base = Grid(mesh=(MeshShape.parse(CUBE),))
    if flags["grid"] is not None:
        base = _named_grid(flags["grid"], grids)
    typed: dict[str, Any] = {name: _values(name, flags[name]) for name in _HELP if flags[name] is not None}
    if flags[MESH]:
        typed[MESH] = tuple(mesh for text in flags[MESH] for mesh in _meshes(text))
    grid = dataclasses.replace(base, **typed)
    grid.cells()  # refuses a factor without values
    return grid


def _named_grid(text: str, grids: Mapping[str, GridMaker]) -> Grid:
    module, _, name = text.rpartition(":")
    if module in ("", MODULE):
        if name not in grids:
            raise UserError(
                f"--grid={shown(text)} is not known; allowed: {', '.join(grids)}{nearest(name, grids)}"
            )
        return grids[name]()
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:  # whatever a module of the user's does
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"--grid={shown(text)}: {reason}; allowed: MODULE:FUNCTION that returns a Grid"
        ) from None
    if not isinstance(made, Grid):
        raise UserError(
            f"--grid={shown(text)} returns {type(made).__name__}; allowed: {Grid.__module__}.{Grid.__name__}"
        )
    made.check(DTYPES)
    return made


def _values(name: str, text: str) -> tuple[Any, ...]:
    if name in _NUMBERS:
        return numbers_of(name, text)
    return tuple(
        _ENUMS[name](part) if name in _ENUMS else part for part in choices_of(name, text, _legal(name))
    )


def _meshes(text: str) -> list[MeshShape]:
    text = text.strip()
    if text.isascii() and text.isdigit() and int(text):
        if int(text) > MOST_CHIPS:
            raise UserError(
                f"--{MESH}={shown(text)}: every mesh of so many chips; allowed: 1 to {MOST_CHIPS}"
            )
        return legal_shapes(int(text))
    return [MeshShape.parse(text)]


def _legal(name: str) -> tuple[str, ...]:
    if name in _ENUMS:
        return tuple(value.value for value in _ENUMS[name])
    return DTYPES.get(name, ())


def _list(values: tuple[Any, ...]) -> str:
    return ",".join(str(getattr(value, "value", value)) for value in values)
