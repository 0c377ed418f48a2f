"""A time with its spread: what a second measurement of the same thing may be expected to give; no jax.

Idea: a timing is made of rounds, with other work between them, so that the rounds hold what changes on a
machine from one moment to the next. If a later measurement of as many rounds sees the same kind of moments,
every order of all the rounds together is equally likely, whatever their distribution. So the chance that its
median lies between the k-th fastest and the k-th slowest of these rounds is a matter of counting: the spread
is the narrowest such interval that holds it at least 9 times in 10. With 7 rounds it is all of them, 93 %.

Two measurements differ beyond noise where their spreads do not overlap: with 7 rounds each, every round of
one is then slower than every round of the other, which happens by chance in 2 of 3,432 orders. A machine that
has changed between them (another load, another clock) does the same, and no statistic can tell it from an
effect.

Data flow: seconds of each round → `Timing.of` → median, quartiles, spread, n.

Worked example: rounds of 10, 11, 12, 12, 13, 15, 19 ms: median 12, quartiles 11.5 and 14, spread 10 to 19 ms.
"""

import dataclasses
import enum
import math
import statistics
from collections.abc import Sequence
from typing import Any

COVERAGE = 0.9
LEAST_ROUNDS = 7  # with fewer not even all of them hold a new median 9 times in 10


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds: median and quartiles of the rounds, and the spread that a new median is expected in."""

    median: float
    quartile_low: float
    quartile_high: float
    spread_low: float
    spread_high: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Timing":
        """From the rounds in the order in which they were taken, at least two."""
        ordered = sorted(rounds)
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        rank = spread_rank(len(ordered))
        return cls(median, low, high, ordered[rank], ordered[-1 - rank], tuple(rounds))

    def to_json(self) -> dict[str, Any]:
        """The fields, with n."""
        return {**dataclasses.asdict(self), "rounds": list(self.rounds), "n": len(self.rounds)}


class Change(enum.Enum):
    """What a comparison says."""

    SAME = "no difference"
    FASTER = "faster"
    SLOWER = "slower"


def covered(rounds: int, rank: int) -> float:
    """Chance that the median of as many new rounds is among these without `rank` of them at each end.

    The new median lies below if more than half of the new rounds do, that is if among all
    2n rounds in order at most `rank` old ones stand before the new median.
    """
    middle = rounds // 2  # place of the (upper) median among the new
    below = sum(
        math.comb(middle + old, old) * math.comb(2 * rounds - 1 - middle - old, rounds - old)
        for old in range(rank + 1)
    )
    return 1 - 2 * below / math.comb(2 * rounds, rounds)


def spread_rank(rounds: int) -> int:
    """How many rounds the spread leaves out at each end."""
    ranks = range((rounds + 1) // 2)
    return max((rank for rank in ranks if covered(rounds, rank) >= COVERAGE), default=0)


def change(before: Timing, after: Timing, least: float) -> Change:
    """Whether `after` differs from `before` beyond noise and by at least the share `least`."""
    apart = after.spread_low > before.spread_high or after.spread_high < before.spread_low
    if not apart or abs(after.median / before.median - 1) < least:
        return Change.SAME
    return Change.SLOWER if after.median > before.median else Change.FASTER


def paired_change(before: Sequence[float], after: Sequence[float], least: float) -> Change:
    """The same for two settings that were timed in turn: round i of one stands beside round i of the other.

    Only where every round agrees on the sign: by chance that happens in 2 of 128 pairs of 7 rounds.
    """
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    agree = min(ratios) > 1 or max(ratios) < 1
    if not agree or abs(statistics.median(ratios) - 1) < least:
        return Change.SAME
    return Change.SLOWER if ratios[0] > 1 else Change.FASTER
