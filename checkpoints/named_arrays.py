"""What a file holds, before anybody knows which model it is: named arrays and a config.

Containers (`.npz` now; others are further functions that return the same) produce `NamedArrays`, and
readers turn them into the neutral state. So a reader never knows the container, a container never
knows the model, and a new one of either is one new file.

Data flow: path → container → `NamedArrays` → reader → `CheckpointState`.

Worked example: `NamedArrays("palm.npz", {"token_emb.weight": [256, 48], ...}, {"gamma_offset": 0})`.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from checkpoints.lazy import ArrayLike
from layers.errors import UserError


@dataclasses.dataclass(frozen=True)
class NamedArrays:
    """The tensors of a foreign checkpoint under their own names.

    Attributes:
      source: the file's name, for messages.
      arrays: name → array-like, not read yet.
      config: the container's metadata; empty where it has none.
    """

    source: str
    arrays: Mapping[str, ArrayLike]
    config: Mapping[str, Any]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of one tensor. Raises UserError if it is missing, naming the closest name."""
        if key not in self.arrays:
            raise UserError(f"{self.source}: missing {key}{closest(key, self.arrays)}")
        return tuple(self.arrays[key].shape)

    def matrix_shape(self, key: str) -> tuple[int, int]:
        """The shape of one two-dimensional tensor. Raises UserError if it is missing or not one."""
        shape = self.shape(key)
        if len(shape) != 2 or min(shape) < 1:
            raise UserError(f"{self.source}: {key} has shape {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def check_config(self, derived: Mapping[str, int]) -> None:
        """Compare sizes that the tensors say with those that the config says, where it says any.

        Args:
          derived: config key → the size that follows from the tensors' shapes.

        Raises UserError naming the first key with both values.
        """
        for key, size in derived.items():
            said = self.config.get(key)
            if said is not None and said != size:
                raise UserError(
                    f"{self.source}: the config says {key}={said!r}, the tensors' shapes say {size}"
                )

    def number(self, key: str, default: float) -> float:
        """A number of the config. Raises UserError if it is there but no finite number."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value - value != 0:
            raise UserError(f"{self.source}: the config says {key}={value!r}, expected a finite number")
        return float(value)

    def integer(self, key: str, default: int) -> int:
        """A positive integer of the config. Raises UserError if it is there but not one."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{self.source}: the config says {key}={value!r}, expected a positive integer")
        return value


def closest(key: str, keys: Mapping[str, Any]) -> str:
    """A hint at the most similar of the keys, or nothing."""
    near = difflib.get_close_matches(key, list(keys), n=1, cutoff=0.6)
    return f"; the closest name there is {near[0]}" if near else ""
