"""Which settings `check` runs: every legal combination, or a small set in which every pair of values occurs.

Most faults show with two settings at once (a layout with an all-to-all, a ring with an int8 weight), so a
pairwise covering set finds them at a small share of the cost; `--exhaustive` runs the whole product.

What cannot run on a mesh is left out, with the reason that `layers.layout` gives.

Data flow: `Factors`, mesh → `all_cases` or `covering_cases` → `Case` → checking.run.

Worked example: on 2,2,2 decoding has 7 legal layouts with 18 legal pairs of layout and all-to-all; times the
legal prefill layouts, 4 collectives, 3 weights, 2 × 2 dtypes, 2 caches, prefixes shared or not, 3 batches
and 3 lengths that are 224,640 cases. The covering set has 68.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inference_engine.config import KV_CACHE_DTYPES
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout, ShardingConfig, check_pair
from layers.mesh_shape import MeshShape

SHARED = "shared"
PREFIXES = ("own", SHARED)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the check: a setting and the batch it runs on.

    Attributes:
      layout, prefill_layout: of decoding and of prefill, over one copy of the weights.
      attn_all_to_all: of decoding; prefill trades over those of its axes that it does not gather.
      kv_cache_dtype: see `EngineConfig`.
      prefixes: whether rows hold what they all begin with themselves, or it is held once for all of them.
      prompt_tokens: of the longest row; row b has (b mod 3) fewer, one at least.
    """

    layout: Layout
    prefill_layout: Layout
    attn_all_to_all: AttnAllToAll
    collectives: CollectiveMode
    weights: str
    activation_dtype: str
    reduce_dtype: str
    kv_cache_dtype: str
    prefixes: str
    batch: int
    prompt_tokens: int

    @property
    def decode(self) -> ShardingConfig:
        """Decoding's layout."""
        collectives = CollectiveConfig(self.collectives, self.reduce_dtype)
        return ShardingConfig(self.layout, self.attn_all_to_all, collectives)

    @property
    def prefill(self) -> ShardingConfig:
        """Prefill's layout."""
        return self.decode.for_prefill(self.prefill_layout)

    def to_json(self) -> dict[str, str | int]:
        """The fields with enums as their text."""
        values = dataclasses.asdict(self)
        return {key: getattr(value, "value", value) for key, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Factors:
    """The values that each field of a case may take."""

    layout: tuple[Layout, ...] = tuple(Layout)
    prefill_layout: tuple[Layout, ...] = tuple(Layout)
    attn_all_to_all: tuple[AttnAllToAll, ...] = tuple(AttnAllToAll)
    collectives: tuple[CollectiveMode, ...] = tuple(CollectiveMode)
    weights: tuple[str, ...] = ("float32", "bfloat16", "int8")
    activation_dtype: tuple[str, ...] = ("float32", "bfloat16")
    reduce_dtype: tuple[str, ...] = ("float32", "bfloat16")
    kv_cache_dtype: tuple[str, ...] = KV_CACHE_DTYPES
    prefixes: tuple[str, ...] = PREFIXES
    batch: tuple[int, ...] = (1, 3, 8)
    prompt_tokens: tuple[int, ...] = (1, 5, 12)

    @property
    def values(self) -> list[tuple[Any, ...]]:
        """Values of each field, in the order of `Case`'s fields."""
        return [getattr(self, field.name) for field in dataclasses.fields(Case)]


FIELDS = tuple(field.name for field in dataclasses.fields(Case))
LAYOUT, PREFILL, TRADE = (FIELDS.index(name) for name in ("layout", "prefill_layout", "attn_all_to_all"))
Chosen = Mapping[int, Any]
"""Values of some fields, by the field's place."""
Value = tuple[int, int]
"""A field's place, and the place of a value among those it may take."""


def refusal(chosen: Chosen, mesh: MeshShape) -> str | None:
    """Why these values cannot run together, None if they can; nothing is said without a decode layout."""
    if LAYOUT not in chosen:
        return None
    layout = chosen[LAYOUT]
    return _refusal(layout, chosen.get(PREFILL, layout), chosen.get(TRADE, AttnAllToAll.NONE), mesh)


@functools.cache
def _refusal(layout: Layout, prefill: Layout, trade: AttnAllToAll, mesh: MeshShape) -> str | None:
    try:
        decode = ShardingConfig(layout, trade)
        check_pair(decode.for_prefill(prefill), decode, mesh)
    except UserError as error:
        return str(error).split("; allowed")[0]
    return None


def illegal_settings(factors: Factors, mesh: MeshShape) -> list[tuple[str, str]]:
    """What of the factors cannot run, and why: single layouts first, then pairs of the layouts that can."""
    found = {}
    for layout in factors.layout:
        why = refusal({LAYOUT: layout}, mesh)
        if why is not None:
            found[f"decode layout {layout.value}"] = why
            continue
        others = [(PREFILL, p) for p in factors.prefill_layout] + [
            (TRADE, t) for t in factors.attn_all_to_all
        ]
        for place, value in others:
            why = refusal({LAYOUT: layout, place: value}, mesh)
            if why is not None:
                found[f"decode layout {layout.value}, {FIELDS[place]} {value.value}"] = why
    return list(found.items())


def all_cases(factors: Factors, mesh: MeshShape) -> Iterator[Case]:
    """Every legal combination."""
    layouts, rest = factors.values[: TRADE + 1], factors.values[TRADE + 1 :]
    for chosen in itertools.product(*layouts):
        if refusal(dict(enumerate(chosen)), mesh) is None:
            yield from (Case(*chosen, *values) for values in itertools.product(*rest))


EXACT = ("float32",)
DTYPES = tuple(FIELDS.index(name) for name in ("activation_dtype", "reduce_dtype"))


def covering_cases(factors: Factors, mesh: MeshShape) -> list[Case]:
    """A small list of cases in which every legal pair of values occurs; always the same list.

    Every pair occurs in float32 throughout, where the tolerance is tight; then come those with another dtype.
    """
    exact = dataclasses.replace(factors, activation_dtype=EXACT, reduce_dtype=EXACT)
    if not _has_exact(factors):
        return _Covering(factors, mesh).cases(_every_pair)
    values = factors.values

    def new(*pair: Value) -> bool:
        return any(field in DTYPES and values[field][at] not in EXACT for field, at in pair)

    cases = _Covering(exact, mesh).cases(_every_pair) + _Covering(factors, mesh).cases(new)
    return list(dict.fromkeys(cases))


def _every_pair(*pair: Value) -> bool:
    del pair
    return True


def _has_exact(factors: Factors) -> bool:
    return all(set(EXACT) <= set(values) for values in (factors.activation_dtype, factors.reduce_dtype))


class _Covering:
    """A pairwise covering list of the legal cases.

    Greedy: each case starts from the first pair that is still missing, and every other field takes the legal
    value that covers most missing pairs with the fields chosen so far.
    """

    def __init__(self, factors: Factors, mesh: MeshShape) -> None:
        self.values, self.mesh = factors.values, mesh
        self.missing: set[tuple[int, int, int, int]] = set()

    def cases(self, wanted: Callable[[Value, Value], bool]) -> list[Case]:
        """Cases that hold all wanted pairs that can run."""
        self.missing = {
            (i, a, j, b)
            for i, j in itertools.combinations(range(len(self.values)), 2)
            for a in range(len(self.values[i]))
            for b in range(len(self.values[j]))
            if wanted((i, a), (j, b))
        }
        found = []
        while self.missing:
            start = min(self.missing)
            chosen = self._row(start)
            self.missing -= {start} if chosen is None else set(_pairs(chosen))
            if chosen is not None:
                found.append(Case(*(options[at] for options, at in zip(self.values, chosen, strict=True))))
        return found

    def _row(self, start: tuple[int, int, int, int]) -> list[int] | None:
        """Indices of one case with this pair that covers many missing ones; None if none can run."""
        i, a, j, b = start
        chosen = {i: a, j: b}
        for field in range(len(self.values)):
            if field in chosen:
                continue
            legal = [at for at in range(len(self.values[field])) if self._can_run(chosen | {field: at})]
            if not legal:
                return None
            gains = [self._gain(field, at, chosen) for at in legal]
            chosen[field] = legal[gains.index(max(gains))]
        return [chosen[field] for field in range(len(self.values))] if self._can_run(chosen) else None

    def _can_run(self, chosen: Mapping[int, int]) -> bool:
        layouts = {field: self.values[field][at] for field, at in chosen.items() if field <= TRADE}
        return refusal(layouts, self.mesh) is None

    def _gain(self, field: int, at: int, chosen: Mapping[int, int]) -> int:
        """Missing pairs that a value would cover with those chosen."""
        return sum(
            ((field, at, other, b) if field < other else (other, b, field, at)) in self.missing
            for other, b in chosen.items()
        )


def _pairs(chosen: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    return ((i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(chosen), 2))
