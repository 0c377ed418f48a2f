"""Laws of a time's spread: it holds a new median as often as it says; the same thing does not differ."""

import itertools
import random
import statistics

import pytest

from inference_engine.profiling.spread import (
    COVERAGE,
    LEAST_ROUNDS,
    Change,
    Timing,
    change,
    covered,
    paired_change,
    spread_rank,
)


@pytest.mark.parametrize(("rounds", "rank"), [(3, 0), (5, 0), (5, 1), (7, 0), (7, 1)])
def test_coverage_is_the_share_of_all_orders(rounds: int, rank: int) -> None:
    inside = total = 0
    for old in itertools.combinations(range(2 * rounds), rounds):
        new = sorted(set(range(2 * rounds)) - set(old))
        total += 1
        inside += old[rank] < new[rounds // 2] < old[-1 - rank]
    assert covered(rounds, rank) == pytest.approx(inside / total)


def test_the_least_number_of_rounds_is_the_first_that_suffices() -> None:
    enough = [rounds for rounds in range(3, 40, 2) if covered(rounds, spread_rank(rounds)) >= COVERAGE]
    assert enough[0] == LEAST_ROUNDS
    assert enough == list(range(LEAST_ROUNDS, 40, 2))


@pytest.mark.parametrize("rounds", [7, 11, 20])
def test_a_new_median_is_within_the_spread_nine_times_in_ten(rounds: int) -> None:
    rng = random.Random(3)
    draw = [[rng.lognormvariate(0.0, 0.5) for _ in range(rounds)] for _ in range(4000)]
    pairs = itertools.pairwise(draw)
    hits = [
        t.spread_low <= statistics.median(new) <= t.spread_high
        for t, new in ((Timing.of(old), new) for old, new in pairs)
    ]
    assert sum(hits) / len(hits) >= COVERAGE


def test_medians_and_quartiles_are_those_of_the_rounds_in_any_order() -> None:
    made = Timing.of([12.0, 10.0, 11.0, 19.0, 12.0, 15.0, 13.0])
    assert (made.quartile_low, made.median, made.quartile_high) == (11.5, 12.0, 14.0)
    assert (made.spread_low, made.spread_high) == (10.0, 19.0)
    assert made.to_json()["n"] == 7


def test_a_setting_does_not_differ_from_itself() -> None:
    rng = random.Random(5)
    differing = 0
    for _ in range(1000):
        a, b = ([rng.gauss(1.0, 0.2) for _ in range(7)] for _ in range(2))
        differing += change(Timing.of(a), Timing.of(b), 0.0) is not Change.SAME
    assert differing <= 3  # by counting, 0.06 % of them
    assert change(Timing.of(a), Timing.of(a), 0.0) is Change.SAME
    assert paired_change(a, a, 0.0) is Change.SAME


def test_a_real_difference_is_named_with_its_direction() -> None:
    slow, fast = Timing.of([2.0 + i / 10 for i in range(7)]), Timing.of([1.0 + i / 10 for i in range(7)])
    assert change(slow, fast, 0.03) is Change.FASTER
    assert change(fast, slow, 0.03) is Change.SLOWER
    assert change(fast, slow, 2.0) is Change.SAME  # less than what is asked for


def test_pairs_see_through_what_both_settings_share() -> None:
    drift = [1.0, 5.0, 2.0, 9.0, 1.5, 4.0, 3.0]
    slower = [1.1 * value for value in drift]
    assert change(Timing.of(drift), Timing.of(slower), 0.03) is Change.SAME
    assert paired_change(drift, slower, 0.03) is Change.SLOWER
    assert paired_change(slower, drift, 0.03) is Change.FASTER
    assert paired_change(drift, [*slower[:-1], 2.9], 0.03) is Change.SAME
