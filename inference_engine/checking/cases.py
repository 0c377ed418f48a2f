"""Which settings `check` runs: every legal combination, or a small set in which every pair of values occurs.

Most faults show with two settings at once (a layout with an all-to-all, a ring with an int8 weight), so a
pairwise covering set finds them at a small share of the cost; `--exhaustive` runs the whole product.

What cannot run on a mesh is left out, with the reason that `layers.layout` gives.

Data flow: `Factors`, mesh → `all_cases` or `covering_cases` → `Case` → checking.run.

Worked example: on 2,2,2 decoding has 7 legal layouts with 18 legal pairs of layout and all-to-all; times the
legal contexts, prefill layouts and their contexts, 4 collectives, 3 weights, 2 × 2 dtypes, 2 caches, prefixes
shared or not, 3 batches and 3 lengths that are 967,680 cases. The covering set has 82.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inference_engine.config import KV_CACHE_DTYPES
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig, check_pair
from layers.mesh_shape import MeshShape

SHARED = "shared"
PREFIXES = ("own", SHARED)
CONTEXTS = (ContextSplit.NONE, ContextSplit.Z, ContextSplit.XY, ContextSplit.XYZ)
"""No, one, two and all axes; the others take part where a flag names them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the check: a setting and the batch it runs on.

    Attributes:
      layout, prefill_layout: of decoding and of prefill, over one copy of the weights.
      attn_all_to_all: of decoding; prefill trades over those of its axes that are free.
      context, prefill_context: the axes over which decoding's cache and prefill deal positions.
      kv_cache_dtype: see `EngineConfig`.
      prefixes: whether rows hold what they all begin with themselves, or it is held once for all of them.
      prompt_tokens: of the longest row; row b has (b mod 3) fewer, one at least.
    """

    layout: Layout
    prefill_layout: Layout
    attn_all_to_all: AttnAllToAll
    context: ContextSplit
    prefill_context: ContextSplit
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
        return ShardingConfig(self.layout, self.attn_all_to_all, collectives, self.context)

    @property
    def prefill(self) -> ShardingConfig:
        """Prefill's layout."""
        return self.decode.for_prefill(self.prefill_layout, self.prefill_context)

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
    context: tuple[ContextSplit, ...] = CONTEXTS
    prefill_context: tuple[ContextSplit, ...] = CONTEXTS
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
LAYOUT_FIELDS = 5
LAYOUT, PREFILL, TRADE, CONTEXT, PREFILL_CONTEXT = range(LAYOUT_FIELDS)  # the other fields go with any
Chosen = Mapping[int, Any]
"""Values of some fields, by the field's place."""
Value = tuple[int, int]
"""A field's place, and the place of a value among those it may take."""


def refusal(chosen: Chosen, mesh: MeshShape) -> str | None:
    """Why these values cannot run together, None if they can; nothing is said without a decode layout."""
    return _refusal(*(chosen.get(place) for place in range(LAYOUT_FIELDS)), mesh)


@functools.cache
def _refusal(
    layout: Layout | None,
    prefill: Layout | None,
    trade: AttnAllToAll | None,
    context: ContextSplit | None,
    prefill_context: ContextSplit | None,
    mesh: MeshShape,
) -> str | None:
    """`refusal` of the first five fields, None where a value is open."""
    if layout is None:
        return None
    none = ContextSplit.NONE

    def run_together() -> None:
        decode = ShardingConfig(layout, trade or AttnAllToAll.NONE, context=context or none)
        first = (layout, none) if prefill is None else (prefill, prefill_context or none)
        check_pair(decode.for_prefill(*first), decode, mesh)

    return _refused(run_together)


def _refused(make: Callable[[], object]) -> str | None:
    """The reason for which something is refused, without what is allowed; None where it is not."""
    try:
        make()
    except UserError as error:
        return str(error).split("; allowed")[0]
    return None


def illegal_settings(factors: Factors, mesh: MeshShape) -> list[tuple[str, str]]:
    """What of the factors cannot run, and why: single layouts first, then pairs of what can."""
    found: dict[str, str | None] = {}
    for layout in factors.layout:
        name = f"decode layout {layout.value}"
        found[name] = refusal({LAYOUT: layout}, mesh)
        if found[name] is None:
            found |= {
                f"{name}, {FIELDS[place]} {value.value}": refusal({LAYOUT: layout, place: value}, mesh)
                for place in (PREFILL, TRADE, CONTEXT)
                for value in factors.values[place]
            }
    for layout, context in itertools.product(factors.prefill_layout, factors.prefill_context):
        prefills = functools.partial(ShardingConfig, layout, context=context, ring=True)
        found[f"prefill_layout {layout.value}, prefill_context {context.value}"] = _refused(prefills)
    for trade, context in itertools.product(factors.attn_all_to_all, factors.context):
        decodes = functools.partial(ShardingConfig, attn_all_to_all=trade, context=context)
        found[f"attn_all_to_all {trade.value}, context {context.value}"] = _refused(decodes)
    return [(name, why) for name, why in found.items() if why is not None]


def all_cases(factors: Factors, mesh: MeshShape) -> Iterator[Case]:
    """Every legal combination."""
    layouts, rest = factors.values[:LAYOUT_FIELDS], factors.values[LAYOUT_FIELDS:]
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
        self.values = factors.values
        self.missing: set[tuple[int, int, int, int]] = set()
        layouts = itertools.product(*(range(len(values)) for values in self.values[:LAYOUT_FIELDS]))
        self.legal = [at for at in layouts if refusal(self._chosen(at), mesh) is None]
        self._can_run = functools.cache(self._extends)

    def _chosen(self, places: Sequence[int]) -> Chosen:
        return {field: self.values[field][at] for field, at in enumerate(places)}

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
            legal = [
                at for at in range(len(self.values[field])) if self._can_run(_layouts(chosen | {field: at}))
            ]
            if not legal:
                return None
            gains = [self._gain(field, at, chosen) for at in legal]
            chosen[field] = legal[gains.index(max(gains))]
        return [chosen[field] for field in range(len(self.values))]

    def _extends(self, chosen: frozenset[Value]) -> bool:
        """Whether some legal choice of all fields of a layout has these values."""
        return any(all(places[field] == at for field, at in chosen) for places in self.legal)

    def _gain(self, field: int, at: int, chosen: Mapping[int, int]) -> int:
        """Missing pairs that a value would cover with those chosen."""
        return sum(
            ((field, at, other, b) if field < other else (other, b, field, at)) in self.missing
            for other, b in chosen.items()
        )


def _layouts(chosen: Mapping[int, int]) -> frozenset[Value]:
    """Of a choice the fields that decide whether it can run."""
    return frozenset((field, at) for field, at in chosen.items() if field < LAYOUT_FIELDS)


def _pairs(chosen: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    return ((i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(chosen), 2))
