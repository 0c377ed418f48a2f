"""How heads are padded and ordered over a mesh, so that one stored copy serves every all-to-all setting.

Logical heads are split over x, then y, then z. The weights' chunks stand in (y, z, x) order, because the
collective matmuls over x come last; so the chunk stored at (y, z, x) holds the logical block (x·Y + y)·Z + z.
With that order a chip's heads are contiguous whichever axes attention trades for the batch, and grouped
queries find their kv heads in one slice.

Heads that don't divide are padded with zero weights: first the group (heads per kv head), then kv heads,
whatever gives the fewest heads in all. Padding touches q, k, v and the attention rows of Wo, never ff.

Worked example: 9 heads in groups of 3 on 2×2×2. Splits into 8, 4, 2 and 1 parts must keep groups whole or
keep a part inside one group: 4 kv heads in groups of 4, 16 heads, 2 a chip, is the smallest way.
"""

import dataclasses
import itertools
import math

import numpy as np

from layers.hparams import HParams
from layers.mesh_shape import MeshShape


@dataclasses.dataclass(frozen=True)
class PaddedHeads:
    """Heads as the mesh holds them.

    Attributes:
      kv_heads, group: padded kv heads, and query heads of each.
      order: for each stored position of a head, the original head it holds, or −1 for padding.
      kv_order: for each padded kv head, the original one, or −1.
    """

    kv_heads: int
    group: int
    order: tuple[int, ...]
    kv_order: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Padded query heads."""
        return self.kv_heads * self.group


def _aligned(kv_heads: int, parts: int) -> bool:
    """Whether splitting the heads into parts leaves groups whole, or parts within one group."""
    return kv_heads % parts == 0 or parts % kv_heads == 0


def _padded_sizes(hparams: HParams, splits: tuple[int, ...]) -> tuple[int, int]:
    """The smallest (kv_heads, group) at least the model's that every split of the heads keeps aligned."""
    chips = max(splits)
    candidates = itertools.product(
        range(hparams.kv_heads, hparams.kv_heads + chips + 1) if hparams.kv_heads > 1 else (1,),
        range(hparams.heads_per_kv, hparams.heads_per_kv + chips + 1),
    )
    legal = (
        (kv_heads * group, kv_heads, group)
        for kv_heads, group in candidates
        if kv_heads * group % chips == 0 and all(_aligned(kv_heads, parts) for parts in splits)
    )
    _, kv_heads, group = min(legal)
    return kv_heads, group


def padded_heads(hparams: HParams, x: int, y: int, z: int) -> PaddedHeads:
    """Padding and stored order of the heads on an x × y × z mesh.

    `order[p]` is the head whose q columns and Wo rows stand at stored position p, p running over chunks in
    (y, z, x) order and over the heads of a chunk.
    """
    kv_heads, group = _padded_sizes(hparams, (x * y * z, x * y, x, 1))
    logical = np.full((kv_heads, group), -1)
    logical[: hparams.kv_heads, : hparams.heads_per_kv] = np.arange(hparams.heads).reshape(
        hparams.kv_heads, hparams.heads_per_kv
    )
    # [x, y, z, heads of a chunk] → stored (y, z, x)
    blocks = logical.reshape(x, y, z, -1)
    stored = blocks.transpose(1, 2, 0, 3).reshape(-1)
    kv_order = tuple(k if k < hparams.kv_heads else -1 for k in range(kv_heads))
    return PaddedHeads(kv_heads, group, tuple(int(h) for h in stored), kv_order)


def padded_form(hparams: HParams, mesh: MeshShape) -> HParams:
    """The model with the heads that a mesh pads it to."""
    heads = padded_heads(hparams, *mesh.sizes)
    return dataclasses.replace(hparams, heads=heads.heads, kv_heads=heads.kv_heads)


@dataclasses.dataclass(frozen=True)
class KVFactors:
    """How padded kv heads divide along the mesh: `x · y · z · rest` of them, x major.

    Each factor divides its axis; a chip at x₀ of X uses the kv heads whose x digit is x₀ · x // X, and the
    same for y and z. Where heads are not split over an axis, a chip holds all digits of it.

    Worked example: 4 kv heads on 2,2,2 are 2 · 2 · 1 · 1: chips that differ in z alone share one.
    """

    x: int
    y: int
    z: int
    rest: int

    @classmethod
    def of(cls, kv_heads: int, x: int, y: int, z: int) -> "KVFactors":
        """Factors of padded kv heads on an x × y × z mesh."""
        digits = []
        for size in (x, y, z):
            digits.append(math.gcd(kv_heads, size))
            kv_heads //= digits[-1]
        return cls(digits[0], digits[1], digits[2], kv_heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(x, y, z, rest)."""
        return self.x, self.y, self.z, self.rest

    def on_a_chip(self, head_axes: tuple[str, ...]) -> int:
        """kv heads of one chip where heads are split over these axes."""
        kept = (count for axis, count in zip("xyz", self.shape, strict=False) if axis not in head_axes)
        return self.rest * math.prod(kept)
