"""Laws of the windows that a long text is scored through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_engine.score_windows import Window, windows
from layers.errors import UserError


@st.composite
def _sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    context = draw(st.integers(2, 40))
    return draw(st.integers(2, 200)), context, draw(st.integers(1, context - 1))


@given(_sizes())
def test_every_token_but_the_first_is_scored_once(sizes: tuple[int, int, int]) -> None:
    count, context, stride = sizes
    scored = [t for cut in windows(count, context, stride) for t in range(cut.first_scored, cut.end)]
    assert scored == list(range(1, count))


@given(_sizes())
def test_tokens_are_scored_after_enough_of_the_text(sizes: tuple[int, int, int]) -> None:
    count, context, stride = sizes
    for cut in windows(count, context, stride):
        assert cut.end - cut.start <= context
        for token in range(cut.first_scored, cut.end):
            before = token - cut.start
            assert before == token or context - stride <= before < context


@given(_sizes())
def test_no_window_is_idle(sizes: tuple[int, int, int]) -> None:
    assert all(cut.start < cut.first_scored < cut.end for cut in windows(*sizes))


def test_a_text_that_fits_is_one_window() -> None:
    assert windows(6, 6, 3) == [Window(0, 1, 6)]
    assert windows(10, 6, 3) == [Window(0, 1, 6), Window(3, 6, 9), Window(6, 9, 10)]


@pytest.mark.parametrize(("stride", "nearest"), [(0, 1), (-3, 1), (6, 5), (99, 5)])
def test_a_stride_that_is_none_is_refused(stride: int, nearest: int) -> None:
    with pytest.raises(UserError, match=f"stride={stride} .* allowed: 1 to 5 .* nearest: {nearest}$"):
        windows(10, 6, stride)
