"""Laws of the mesh: whatever the layouts, the all-to-all and the collectives, logits are one device's."""

import functools
import itertools
import random

import pytest

from checkpoints.load import WeightsDtype
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.errors import UserError
from layers.layout import AttnAllToAll, Layout, ShardingConfig, check_pair
from layers.mesh_shape import MeshShape
from tests.mesh_models import error
from tests.model_forms import FORMS

TOLERANCE = 1e-5
CUBE = MeshShape(2, 2, 2)
OTHER_MESHES = [MeshShape.parse(text) for text in ("4,2,1", "1,4,2", "2,1,3", "1,1,1")]
GROUPED, MULTIQUERY, SERIAL = "nine_heads_grouped", "palm", "gemma2"
Pair = tuple[ShardingConfig, ShardingConfig]
"""Prefill and decoding."""


@functools.cache
def _legal(mesh: MeshShape) -> list[Pair]:
    """Every legal pair of layouts and all-to-all, the collectives in turn."""
    modes = itertools.cycle(CollectiveMode)
    found = []
    for layout, trade, prefill in itertools.product(Layout, AttnAllToAll, Layout):
        try:
            decode = ShardingConfig(layout, trade, CollectiveConfig(next(modes)))
            pair = decode.for_prefill(prefill), decode
            check_pair(*pair, mesh)
        except UserError:
            continue
        found.append(pair)
    return found


def _chosen(mesh: MeshShape, every: int) -> list[Pair]:
    """Pairs with each decode layout and all-to-all, or with each prefill layout, by turns: one in `every`."""
    legal, seen = _legal(mesh), set()
    by_layout = []
    for prefill, decode in random.Random(0).sample(legal, len(legal)):
        keys = {(decode.layout, decode.attn_all_to_all), (None, prefill.layout)}
        if not keys <= seen:
            seen |= keys
            by_layout.append((prefill, decode))
    return by_layout[::every]


def _name(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(_name(part) for part in value)
    if not isinstance(value, ShardingConfig):
        return str(value)
    return f"{value.layout.value}-{value.attn_all_to_all.value}-{value.collectives.mode.value}"


def _error(name: str, mesh: MeshShape, pair: Pair, batch: int = 3, **options: object) -> float:
    prefill, decode = pair
    return error(name, mesh, decode, batch, prefill=None if prefill == decode else prefill, **options)


def test_core_cases_hold_every_layout_and_every_all_to_all_it_allows() -> None:
    legal, cases = _legal(CUBE), _chosen(CUBE, 1)
    assert {d.layout for _, d in cases} == {d.layout for _, d in legal}
    assert {(d.layout, d.attn_all_to_all) for _, d in cases} == {
        (d.layout, d.attn_all_to_all) for _, d in legal
    }
    assert {p.layout for p, _ in cases} == set(Layout)


@pytest.mark.parametrize("pair", _chosen(CUBE, 1), ids=_name)
def test_grouped_query_logits_are_one_devices(pair: Pair) -> None:
    assert _error(GROUPED, CUBE, pair) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 4), ids=_name)
def test_multiquery_logits_are_one_devices(pair: Pair) -> None:
    assert _error(MULTIQUERY, CUBE, pair) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 4), ids=_name)
def test_serial_logits_are_one_devices(pair: Pair) -> None:
    assert _error(SERIAL, CUBE, pair) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 5), ids=_name)
def test_int8_logits_are_one_devices_int8(pair: Pair) -> None:
    assert _error(GROUPED, CUBE, pair, weights=WeightsDtype.INT8) <= TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "pair"), [(mesh, pair) for mesh in OTHER_MESHES for pair in _chosen(mesh, 6)], ids=_name
)
def test_every_mesh_shape_gives_one_devices_logits(mesh: MeshShape, pair: Pair) -> None:
    assert _error(GROUPED, mesh, pair) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 9), ids=_name)
def test_unrolled_layers_give_one_devices_logits(pair: Pair) -> None:
    assert _error("qwen2", CUBE, pair, stacked=False) <= TOLERANCE


@pytest.mark.parametrize("pair", _chosen(CUBE, 6), ids=_name)
@pytest.mark.parametrize("name", [GROUPED, "palm_rlhf_xpos"])
def test_an_int8_cache_moves_logits_by_its_rounding(name: str, pair: Pair) -> None:
    assert 1e-5 < _error(name, CUBE, pair, cache_dtype="int8") < 2e-2


@pytest.mark.parametrize("pair", _chosen(CUBE, 9), ids=_name)
@pytest.mark.parametrize("batch", [1, 8])
def test_any_batch_gives_one_devices_logits(batch: int, pair: Pair) -> None:
    assert _error(GROUPED, CUBE, pair, batch) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("mesh", [CUBE, *OTHER_MESHES], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_one_devices_logits(name: str, mesh: MeshShape) -> None:
    for pair in _chosen(mesh, 4):
        assert _error(name, mesh, pair) <= TOLERANCE, _name(pair)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "pair"), [(mesh, pair) for mesh in (CUBE, *OTHER_MESHES) for pair in _legal(mesh)], ids=_name
)
def test_every_legal_pair_gives_one_devices_logits(mesh: MeshShape, pair: Pair) -> None:
    assert _error(GROUPED, mesh, pair) <= TOLERANCE
