"""Positions dealt over chips like cards: how a text longer than one chip holds lies in a KV cache.

Of P chips, chip i holds the positions i, i + P, i + 2·P, …, so that every text, short or long, is shared out
evenly, and so is the causal work of every chunk of a prompt (Brandon et al., 2023, "Striped Attention").
Nothing has to know how prompts are cut: where a position is, and at which index, follows from the position
and P alone.

In prefill a step's tokens are dealt in the same way, and a chip writes what it computed. In decoding a token
is written by the chip that holds its position and by no other.

Data flow: tokens [batch, time] → `dealt` → [batch, P · time/P], chip i has part i → keys at index
start/P → `Segment` with its `Striping` → attention. Whole again: `gathered`.

Worked example: position 5,000 on 8 chips is index 625 of chip 0. A text of 5,001 positions has 626 on chip 0
and 625 on each of the others.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@flax.struct.dataclass
class Striping:
    """This chip's places of a sequence: `chip`, `chip` + `chips`, and so on."""

    chip: Int[Array, ""]
    chips: int = flax.struct.field(pytree_node=False)

    def place(self, index: Int[Array, "*any"]) -> Int[Array, "*any"]:
        """The place in the sequence of what stands at an index here."""
        return index * self.chips + self.chip

    def held(self, below: Int[Array, "*any"]) -> Int[Array, "*any"]:
        """How many of the places below a number are here."""
        return (below - self.chip + self.chips - 1) // self.chips

    def index(self, place: Int[Array, "*any"], otherwise: int) -> Int[Array, "*any"]:
        """Where a place is here; `otherwise` for one of another chip."""
        return jnp.where(place % self.chips == self.chip, place // self.chips, otherwise)


def striping(axes: tuple[str, ...]) -> Striping | None:
    """This chip's part of what is dealt over mesh axes; None over no axes."""
    return Striping(lax.axis_index(axes), lax.axis_size(axes)) if axes else None


def dealt(x: jax.Array, chips: int, dim: int) -> jax.Array:
    """A dim in order → chip by chip, each one's places in order; its length is a multiple of the chips."""
    return _swapped(x, -1, chips, dim)


def gathered(x: jax.Array, chips: int, dim: int) -> jax.Array:
    """The inverse of `dealt`."""
    return _swapped(x, chips, -1, dim)


def _swapped(x: jax.Array, major: int, minor: int, dim: int) -> jax.Array:
    """A dim seen as major × minor, transposed."""
    split = x.reshape(*x.shape[:dim], major, minor, *x.shape[dim + 1 :])
    return jnp.swapaxes(split, dim, dim + 1).reshape(x.shape)


def write_index(
    start: Int[Array, "*rows"], time: int, stripes: Striping | None, *, split: bool, end: int
) -> Int[Array, "*rows"]:
    """The cache index here of a step's first token, whose place is `start`.

    Args:
      start: one a row, or one for all where tokens are dealt too; then it is a multiple of the chips.
      time: tokens of the step; more than one only where they are dealt.
      stripes, split: how the cache is dealt, and whether the tokens are too.
      end: an index beyond the cache, at which nothing is written.
    """
    if stripes is None or stripes.chips == 1:
        return start
    if split and not start.ndim:
        return start // stripes.chips
    if split or time > 1 or not start.ndim:
        raise ValueError(
            "tokens of a dealt cache; allowed: dealt ones from one index on, or one a row at its own index"
        )
    return stripes.index(start, end)
