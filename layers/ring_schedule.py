"""Who holds which tokens, and which hops of a ring somebody needs.

A text is spread over the chips of a ring in contiguous chunks, or in zigzag: the text is cut into 2·P pieces
and chip i holds pieces i and 2P − 1 − i. Under a causal mask the first chip of the contiguous order sees
almost nothing and the last everything; in zigzag all do the same work.

Keys travel by +1, so after `offset` hops chip i holds the keys of chip i − offset. A window bounds the
offsets that any chip needs; they form an arc of the ring, and only the arc is walked.

Data flow: order, lengths and reach → `Span`s of each chip → `Arc`.

Worked example: 16 tokens on 4 chips in zigzag are [0,1,14,15, 2,3,12,13, 4,5,10,11, 6,7,8,9]. Contiguous
with reach (3, 0), chip i needs its own keys and those of chip i − 1: the arc starts at 0 and has 2 chunks,
one hop.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

UNBOUNDED = 2**30
"""A reach beyond every position; positions stay below 2²⁹."""

Span = tuple[int, int]
"""First and last position of a run of tokens."""


class TokenOrder(enum.Enum):
    """How a text is spread over the chips of a ring."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far a query sees: keys from `left` positions before it to `right` after it, both inclusive."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @classmethod
    def of(cls, is_causal: bool, window_size: tuple[int, int] = (-1, -1)) -> "Reach":
        """From a mask and a window (left, right), −1 for no bound.

        Raises:
          ValueError: a window below −1.
        """
        if min(window_size) < -1:
            raise ValueError(f"window_size is {window_size}; allowed: −1 (no bound), 0, 1, …")
        left, right = (UNBOUNDED if size == -1 else size for size in window_size)
        return cls(left, min(right, 0) if is_causal else right)

    def needs(self, queries: Span, keys: Span) -> bool:
        """Whether any query of a span sees a key of another."""
        return queries[0] - keys[1] <= self.left and keys[0] - queries[1] <= self.right


@dataclasses.dataclass(frozen=True)
class Arc:
    """The chunks a chip walks: those of chips i − start, i − start − 1, …, `count` of them."""

    start: int
    count: int


def zigzag_permutation(length: int, chips: int) -> np.ndarray:
    """Positions in zigzag order: `x[permutation]` is what the chips hold, in order of chips.

    Raises:
      ValueError: the length does not divide into 2 · chips pieces.
    """
    pieces = np.arange(length).reshape(2 * chips, piece_length(length, chips))
    return np.stack([pieces[:chips], pieces[::-1][:chips]], axis=1).reshape(length)


def inverse_zigzag_permutation(length: int, chips: int) -> np.ndarray:
    """The way back: `held[inverse]` is in the order of the text."""
    return np.argsort(zigzag_permutation(length, chips))


def piece_length(length: int, chips: int) -> int:
    """Tokens of one zigzag piece."""
    pieces = 2 * chips
    if length % pieces:
        raise ValueError(
            f"a text of {length} tokens in zigzag order over {chips} chips; allowed: multiples of {pieces}; "
            f"nearest: {-(-length // pieces) * pieces}, with the padding in a segment of its own"
        )
    return length // pieces


def chip_spans(order: TokenOrder, length: int, chips: int, first: int = 0) -> list[list[Span]]:
    """The runs of positions that each chip holds, of a text that starts at position `first`."""
    if order is TokenOrder.ZIGZAG:
        piece = piece_length(length, chips)
        starts = [[first + i * piece, first + (2 * chips - 1 - i) * piece] for i in range(chips)]
    else:
        piece = length // chips
        starts = [[first + i * piece] for i in range(chips)]
    return [[(start, start + piece - 1) for start in chip] for chip in starts]


def needed_arc(queries: Sequence[Sequence[Span]], keys: Sequence[Sequence[Span]], reach: Reach) -> Arc:
    """The smallest arc of offsets outside which no chip's queries see another chip's keys."""
    chips = len(queries)
    needed = {
        (i - j) % chips
        for i in range(chips)
        for j in range(chips)
        if any(reach.needs(q, k) for q in queries[i] for k in keys[j])
    }
    if not needed:
        return Arc(0, 0)
    lengths = {start: 1 + max((offset - start) % chips for offset in needed) for start in sorted(needed)}
    start = min(lengths, key=lambda start: lengths[start])
    return Arc(start, lengths[start])
