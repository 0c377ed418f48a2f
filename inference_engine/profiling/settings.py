"""What is measured: one setting a cell, and grids of them; no jax.

A cell is a model's step on a mesh in one setting. A grid holds the values of every factor; its cells are all
combinations. Whether a combination can run is not decided here: what refuses it (the layout, the mesh, the
model) says so when the cell is prepared.

Data flow: flags or configs/sweeps.py → `Grid` → `cells` → `Setting`s → rows.

Worked example: 2 meshes × 2 layouts × 4 all-to-alls × 2 batches of decode steps are 32 cells.
"""

import dataclasses
import enum
import hashlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout, ShardingConfig
from layers.mesh_shape import MeshShape


class Step(enum.Enum):
    """Which of the engine's programs is timed."""

    DECODE = "decode"  # `generate`: one token for each text of the batch
    PREFILL = "prefill"  # `prefill` of whole prompts: `context` tokens for each text of the batch


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell.

    Attributes:
      step: see `Step`.
      mesh, layout, attn_all_to_all, collectives, reduce_dtype: how the model lies on the chips.
      weights, activation_dtype: dtypes.
      batch: texts that are computed together.
      context: tokens in the cache when a decode step begins; tokens of a prompt that is prefilled.
    """

    step: Step
    mesh: MeshShape
    layout: Layout
    attn_all_to_all: AttnAllToAll
    collectives: CollectiveMode
    reduce_dtype: str
    weights: str
    activation_dtype: str
    batch: int
    context: int

    @property
    def sharding(self) -> ShardingConfig:
        """How the layers run."""
        return ShardingConfig(
            self.layout, self.attn_all_to_all, CollectiveConfig(self.collectives, self.reduce_dtype)
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by name, with the values that the command line takes."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def words(self) -> str:
        """One phrase."""
        return " ".join(map(str, self.to_json().values()))


@dataclasses.dataclass(frozen=True)
class Method:
    """How a cell is timed: rounds, and decode steps a round."""

    rounds: int = 7
    steps: int = 8


def config_hash(value: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of what a row measures: equal for equal objects, whatever their key order."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Values of each factor; the cells are all combinations.

    Attributes: see `Setting`; each is a tuple of values.
    """

    mesh: tuple[MeshShape, ...]
    layout: tuple[Layout, ...] = tuple(Layout)
    attn_all_to_all: tuple[AttnAllToAll, ...] = tuple(AttnAllToAll)
    collectives: tuple[CollectiveMode, ...] = (CollectiveMode.REFERENCE,)
    reduce_dtype: tuple[str, ...] = ("float32",)
    weights: tuple[str, ...] = ("float32",)
    activation_dtype: tuple[str, ...] = ("float32",)
    batch: tuple[int, ...] = (8,)
    context: tuple[int, ...] = (128,)
    step: tuple[Step, ...] = (Step.DECODE,)

    def cells(self, seed: int = 0) -> list[Setting]:
        """Every combination once, in an order of chance that the seed fixes.

        Raises UserError for a factor without values.
        """
        names = [field.name for field in dataclasses.fields(Setting)]
        empty = [name for name in names if not getattr(self, name)]
        if empty:
            raise UserError(f"the grid has no cells: {', '.join(empty)} has no value; allowed: at least one")
        values = [dict.fromkeys(getattr(self, name)) for name in names]  # each once, in order
        found = [Setting(*combination) for combination in itertools.product(*values)]
        random.Random(seed).shuffle(found)
        return found

    def check(self, kinds: Mapping[str, Sequence[str]]) -> None:
        """Refuses values of another type than a flag would give; `kinds` are the legal texts of some factors.

        Raises UserError.
        """
        types = {field.name: field.type for field in dataclasses.fields(Setting)}
        for name, wanted in types.items():
            for value in getattr(self, name):
                legal = isinstance(value, wanted) if isinstance(wanted, type) else True
                if name in kinds:
                    legal = value in kinds[name]
                if wanted is int:
                    legal = isinstance(value, int) and not isinstance(value, bool) and value >= 1
                if not legal:
                    allowed = _allowed(name, wanted, kinds)
                    raise UserError(f"{name}={value!r} of the grid is not allowed; allowed: {allowed}")


def _allowed(name: str, wanted: Any, kinds: Mapping[str, Sequence[str]]) -> str:
    if name in kinds:
        return ", ".join(kinds[name])
    return "integers from 1" if wanted is int else f"values of {wanted.__name__}"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, MeshShape) else value
