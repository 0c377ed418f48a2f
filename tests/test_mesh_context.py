"""Laws of context parallelism on the mesh: dealt positions, in prefill or in the cache, change no logits."""

import functools
import itertools
import random

import pytest

from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig, check_pair
from layers.mesh_shape import MeshShape
from tests.mesh_models import error

TOLERANCE = 1e-5
CUBE = MeshShape(2, 2, 2)
OTHER_MESHES = [MeshShape.parse(text) for text in ("4,2,1", "1,4,2", "2,1,3", "3,2,1")]
GROUPED, MULTIQUERY, WINDOWS, XPOS = "nine_heads_grouped", "palm", "gemma2", "palm_rlhf_xpos"
Pair = tuple[ShardingConfig, ShardingConfig]
"""Prefill and decoding."""


@functools.cache
def _drawn(mesh: MeshShape) -> tuple[Pair, ...]:
    """Legal pairs with a context in prefill or decoding, of many drawn at random, the collectives in turn."""
    draw, modes = random.Random(str(mesh)), itertools.cycle(CollectiveMode)
    found = []
    for _ in range(1000):
        layout, prefill = draw.choice(list(Layout)), draw.choice(list(Layout))
        trade = draw.choice(list(AttnAllToAll))
        contexts = draw.choices(list(ContextSplit), k=2)
        try:
            decode = ShardingConfig(layout, trade, CollectiveConfig(next(modes)), contexts[1])
            pair = decode.for_prefill(prefill, contexts[0]), decode
            check_pair(*pair, mesh)
        except UserError:
            continue
        if contexts != [ContextSplit.NONE] * 2:
            found.append(pair)
    return tuple(found)


def _chosen(mesh: MeshShape, count: int) -> list[Pair]:
    """About `count` of those pairs that bring two settings together that none before them did."""
    seen, found = set[tuple](), []
    for prefill, decode in _drawn(mesh):
        keys = {
            ("prefill", prefill.layout, prefill.context),
            ("decode", decode.layout, decode.context),
            ("trade", decode.attn_all_to_all, decode.context),
            ("both", prefill.context, decode.context),
        }
        if len(keys - seen) >= 2:
            seen |= keys
            found.append((prefill, decode))
    return found[:: max(1, len(found) // count)]


def _name(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(_name(part) for part in value)
    if not isinstance(value, ShardingConfig):
        return str(value)
    parts = (value.layout, value.attn_all_to_all, value.context, value.collectives.mode)
    return "-".join(part.value for part in parts)


def _error(name: str, mesh: MeshShape, pair: Pair, batch: int = 3, **options: object) -> float:
    prefill, decode = pair
    return error(name, mesh, decode, batch, prefill=prefill, **options)


@pytest.mark.parametrize("pair", _chosen(CUBE, 10), ids=_name)
def test_grouped_query_logits_are_one_devices(pair: Pair) -> None:
    assert _error(GROUPED, CUBE, pair) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "pair"), [*zip([MULTIQUERY, WINDOWS] * 3, _chosen(CUBE, 6), strict=False)], ids=_name
)
def test_multiquery_windows_and_caps_give_one_devices_logits(name: str, pair: Pair) -> None:
    assert _error(name, CUBE, pair) <= TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "pair"), [(mesh, pair) for mesh in OTHER_MESHES for pair in _chosen(mesh, 1)], ids=_name
)
def test_every_mesh_shape_gives_one_devices_logits(mesh: MeshShape, pair: Pair) -> None:
    assert _error(GROUPED, mesh, pair) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 2), ids=_name)
def test_an_int8_cache_moves_logits_by_its_rounding(pair: Pair) -> None:
    assert 1e-5 < _error(XPOS, CUBE, pair, cache_dtype="int8") < 2e-2


@pytest.mark.parametrize(("batch", "pair"), [*zip([1, 8], _chosen(CUBE, 2), strict=False)], ids=_name)
def test_any_batch_gives_one_devices_logits(batch: int, pair: Pair) -> None:
    assert _error(GROUPED, CUBE, pair, batch, stacked=batch == 1) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "pair"),
    [(mesh, pair) for mesh in (CUBE, *OTHER_MESHES) for pair in _chosen(mesh, 99)],
    ids=_name,
)
@pytest.mark.parametrize("name", [GROUPED, MULTIQUERY, WINDOWS])
def test_every_layout_with_every_context_gives_one_devices_logits(
    name: str, mesh: MeshShape, pair: Pair
) -> None:
    assert _error(name, mesh, pair) <= TOLERANCE
