"""Laws of the mesh: whatever the layout, the all-to-all and the collectives, logits are one device's."""

import pytest

from checkpoints.load import WeightsDtype
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.layout import AttnAllToAll, Layout, ShardingConfig
from layers.mesh_shape import MeshShape
from tests.mesh_models import error
from tests.model_forms import FORMS

TOLERANCE = 1e-5
LAYOUTS, SETTINGS, MODES = tuple(Layout), tuple(AttnAllToAll), tuple(CollectiveMode)
CUBE = "2,2,2"
OTHER_MESHES = ("4,2,1", "1,4,2", "2,1,3", "1,1,1")
GROUPED, MULTIQUERY, SERIAL = "nine_heads_grouped", "palm", "gemma2"


def _setting(layout: int, attn_all_to_all: int, mode: int) -> ShardingConfig:
    """By index, each modulo its number of values."""
    return ShardingConfig(
        LAYOUTS[layout % len(LAYOUTS)],
        SETTINGS[attn_all_to_all % len(SETTINGS)],
        CollectiveConfig(MODES[mode % len(MODES)]),
    )


# Of layout, all-to-all and collectives every pair of values occurs in these together.
GROUPED_CASES = [_setting(layout, setting, setting + 2 * layout) for layout in (0, 1) for setting in range(4)]
MULTIQUERY_CASES = [_setting(at, at, at + 1) for at in range(4)]
SERIAL_CASES = [_setting(at + 1, at, at + 3) for at in range(4)]
ALL_CASES = [_setting(a, b, c) for a in range(2) for b in range(4) for c in range(4)]


def _name(value: object) -> str:
    if not isinstance(value, ShardingConfig):
        return str(value)
    return f"{value.layout.value}-{value.attn_all_to_all.value}-{value.collectives.mode.value}"


def test_core_cases_hold_every_pair_of_values() -> None:
    cases = GROUPED_CASES + MULTIQUERY_CASES + SERIAL_CASES
    found = {(c.layout, c.attn_all_to_all) for c in cases}
    assert len(found) == len(LAYOUTS) * len(SETTINGS)
    assert len({(c.layout, c.collectives.mode) for c in cases}) == len(LAYOUTS) * len(MODES)
    assert len({(c.attn_all_to_all, c.collectives.mode) for c in cases}) == len(SETTINGS) * len(MODES)


@pytest.mark.parametrize("sharding", GROUPED_CASES, ids=_name)
def test_grouped_query_logits_are_one_devices(sharding: ShardingConfig) -> None:
    assert error(GROUPED, MeshShape.parse(CUBE), sharding, batch=3) <= TOLERANCE


@pytest.mark.parametrize("sharding", MULTIQUERY_CASES, ids=_name)
def test_multiquery_logits_are_one_devices(sharding: ShardingConfig) -> None:
    assert error(MULTIQUERY, MeshShape.parse(CUBE), sharding, batch=3) <= TOLERANCE


@pytest.mark.parametrize("sharding", SERIAL_CASES, ids=_name)
def test_serial_logits_are_one_devices(sharding: ShardingConfig) -> None:
    assert error(SERIAL, MeshShape.parse(CUBE), sharding, batch=3) <= TOLERANCE


@pytest.mark.parametrize("sharding", [_setting(0, 3, 3), _setting(1, 1, 2)], ids=_name)
def test_int8_logits_are_one_devices_int8(sharding: ShardingConfig) -> None:
    assert error(GROUPED, MeshShape.parse(CUBE), sharding, 3, WeightsDtype.INT8) <= TOLERANCE


@pytest.mark.parametrize("layout", [0, 1], ids=["1d", "2d"])
@pytest.mark.parametrize("mesh", OTHER_MESHES)
def test_every_mesh_shape_gives_one_devices_logits(mesh: str, layout: int) -> None:
    at = OTHER_MESHES.index(mesh)
    sharding = _setting(layout, at + 2 * layout + 1, at + 1 + layout)
    assert error(GROUPED, MeshShape.parse(mesh), sharding, batch=3) <= TOLERANCE


def test_unrolled_layers_give_one_devices_logits() -> None:
    assert error("qwen2", MeshShape.parse(CUBE), _setting(1, 2, 3), batch=3, stacked=False) <= TOLERANCE


@pytest.mark.parametrize("batch", [1, 8])
def test_any_batch_gives_one_devices_logits(batch: int) -> None:
    assert error(GROUPED, MeshShape.parse(CUBE), _setting(1, 3, 2), batch=batch) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("mesh", [CUBE, *OTHER_MESHES])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_one_devices_logits(name: str, mesh: str) -> None:
    for at in range(4):
        for layout in (0, 1):
            sharding = _setting(layout, at, at + layout)
            assert error(name, MeshShape.parse(mesh), sharding, batch=3) <= TOLERANCE, _name(sharding)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [CUBE, *OTHER_MESHES])
@pytest.mark.parametrize("sharding", ALL_CASES, ids=_name)
def test_every_setting_gives_one_devices_logits(sharding: ShardingConfig, mesh: str) -> None:
    assert error(GROUPED, MeshShape.parse(mesh), sharding, batch=3) <= TOLERANCE
