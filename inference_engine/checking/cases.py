"""Which settings `check` runs: every legal combination, or a small set in which every pair of values occurs.

Most faults show with two settings at once (a layout with an all-to-all, a ring with an int8 weight), so a
pairwise covering set finds them at a small share of the cost; `--exhaustive` runs the whole product.

Data flow: `FACTORS` → `all_cases` or `covering_cases` → `Case` → checking.run.

Worked example: 2 layouts × 4 all-to-alls × 4 collectives × 3 weights × 2 × 2 dtypes × 3 batches × 3 lengths
are 3456 combinations; the covering set has 35.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, Layout


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the check: a setting and the batch it runs on.

    Attributes:
      prompt_tokens: of the longest row; row b has (b mod 3) fewer, one at least.
    """

    layout: Layout
    attn_all_to_all: AttnAllToAll
    collectives: CollectiveMode
    weights: str
    activation_dtype: str
    reduce_dtype: str
    batch: int
    prompt_tokens: int

    def to_json(self) -> dict[str, str | int]:
        """The fields with enums as their text."""
        values = dataclasses.asdict(self)
        return {key: getattr(value, "value", value) for key, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Factors:
    """The values that each field of a case may take."""

    layout: tuple[Layout, ...] = tuple(Layout)
    attn_all_to_all: tuple[AttnAllToAll, ...] = tuple(AttnAllToAll)
    collectives: tuple[CollectiveMode, ...] = tuple(CollectiveMode)
    weights: tuple[str, ...] = ("float32", "bfloat16", "int8")
    activation_dtype: tuple[str, ...] = ("float32", "bfloat16")
    reduce_dtype: tuple[str, ...] = ("float32", "bfloat16")
    batch: tuple[int, ...] = (1, 3, 8)
    prompt_tokens: tuple[int, ...] = (1, 5, 12)

    @property
    def values(self) -> list[tuple[Any, ...]]:
        """Values of each field, in the order of `Case`'s fields."""
        return [getattr(self, field.name) for field in dataclasses.fields(Case)]


def all_cases(factors: Factors) -> Iterator[Case]:
    """The whole product."""
    return (Case(*values) for values in itertools.product(*factors.values))


EXACT = ("float32",)


def covering_cases(factors: Factors) -> list[Case]:
    """A small list of cases in which every pair of values of two fields occurs; always the same list.

    Every pair occurs in float32 throughout, where the tolerance is tight, and then with the other dtypes.
    """
    exact = dataclasses.replace(factors, activation_dtype=EXACT, reduce_dtype=EXACT)
    return list(dict.fromkeys(_covering(exact) + _covering(factors)))


def _covering(factors: Factors) -> list[Case]:
    """A pairwise covering list.

    Greedy: each case starts from the first pair that is still missing, and every other field takes the value
    that covers most missing pairs with the fields chosen so far.
    """
    values = factors.values
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    if not missing:
        return list(all_cases(factors))
    cases = []
    while missing:
        chosen = _next_row(values, missing)
        missing -= set(_pairs(chosen))
        cases.append(Case(*(options[at] for options, at in zip(values, chosen, strict=True))))
    return cases


def _next_row(values: Sequence[tuple[Any, ...]], missing: set[tuple[int, int, int, int]]) -> list[int]:
    """Indices of one case that covers many missing pairs."""
    i, a, j, b = min(missing)
    chosen: dict[int, int] = {i: a, j: b}
    for field in range(len(values)):
        if field not in chosen:
            gains = [_gain(field, at, chosen, missing) for at in range(len(values[field]))]
            chosen[field] = gains.index(max(gains))
    return [chosen[field] for field in range(len(values))]


def _gain(field: int, at: int, chosen: dict[int, int], missing: set[tuple[int, int, int, int]]) -> int:
    """Missing pairs that a value would cover with those chosen."""
    return sum(
        ((field, at, other, b) if field < other else (other, b, field, at)) in missing
        for other, b in chosen.items()
    )


def _pairs(chosen: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    return ((i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(chosen), 2))
