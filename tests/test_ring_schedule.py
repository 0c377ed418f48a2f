"""Laws of who holds what: zigzag and its inverse, and the arc of the ring that a window needs."""

import numpy as np
import pytest

from layers.ring_schedule import (
    Arc,
    Reach,
    TokenOrder,
    chip_spans,
    inverse_zigzag_permutation,
    needed_arc,
    zigzag_permutation,
)
from tests.attention_oracle import mask_of

RINGS = pytest.mark.parametrize("chips", [1, 2, 3, 4, 8])


def test_zigzag_order_is_as_documented() -> None:
    assert zigzag_permutation(16, 4).tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


@RINGS
def test_zigzag_has_an_inverse(chips: int) -> None:
    permutation = zigzag_permutation(6 * chips, chips)
    assert np.array_equal(permutation[inverse_zigzag_permutation(6 * chips, chips)], np.arange(6 * chips))
    spans = chip_spans(TokenOrder.ZIGZAG, 6 * chips, chips)
    held = [p for chip in spans for first, last in chip for p in range(first, last + 1)]
    assert held == permutation.tolist()


def test_a_text_that_does_not_divide_is_refused_with_the_nearest_length() -> None:
    with pytest.raises(ValueError, match=r"17 tokens .* multiples of 8; nearest: 24"):
        zigzag_permutation(17, 4)


def test_a_window_below_minus_one_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: −1"):
        Reach.of(False, (-2, 0))


@RINGS
@pytest.mark.parametrize("order", TokenOrder, ids=lambda order: order.value)
@pytest.mark.parametrize(
    "window", [(-1, -1), (0, 0), (1, 0), (3, 0), (4, 0), (5, 2), (0, 9), (-1, 0), (-1, 3)]
)
@pytest.mark.parametrize("extra", [-2, 0, 3])
def test_the_arc_holds_every_chunk_that_a_query_sees(
    chips: int, order: TokenOrder, window: tuple[int, int], extra: int
) -> None:
    time, keys = 4 * chips, (4 + 2 * (extra // 2)) * chips
    mask = mask_of(time, keys, window=window)[0]
    reach = Reach.of(False, window)
    queries = chip_spans(order, time, chips, keys - time)
    held = chip_spans(order, keys, chips)
    arc = needed_arc(queries, held, reach)
    walked = {(arc.start + k) % chips for k in range(arc.count)}
    needed = set()
    for i in range(chips):
        for j in range(chips):
            rows = [p - (keys - time) for first, last in queries[i] for p in range(first, last + 1)]
            columns = [p for first, last in held[j] for p in range(first, last + 1)]
            if mask[np.ix_(rows, columns)].any():
                needed.add((i - j) % chips)
    assert needed <= walked
    if needed:
        assert arc.start in needed
        assert (arc.start + arc.count - 1) % chips in needed


def test_windows_shorten_the_walk() -> None:
    spans = chip_spans(TokenOrder.CONTIGUOUS, 32, 8)
    assert needed_arc(spans, spans, Reach.of(True)) == Arc(0, 8)
    assert needed_arc(spans, spans, Reach.of(True, (3, -1))) == Arc(0, 2)
    assert needed_arc(spans, spans, Reach.of(False, (5, 4))) == Arc(7, 4)
    assert needed_arc(spans, spans, Reach.of(True, (0, 0))) == Arc(0, 1)
    far = chip_spans(TokenOrder.CONTIGUOUS, 32, 8, first=1000)
    assert needed_arc(far, spans, Reach.of(True, (3, -1))) == Arc(0, 0)
