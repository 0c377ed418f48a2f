"""Where a measurement runs is said in full, and this CPU is measured once for a results file."""

import dataclasses
import importlib.metadata

import jax
import pytest

from inference_engine.profiling import place
from inference_engine.profiling.chips import ChipSpec
from inference_engine.profiling.host_speed import MatmulSpeed
from inference_engine.profiling.place import Place, cpu_name, find_place, this_cpu, versions

CHIP = ChipSpec("c", {"float32": 8e9}, memory_speed=16e9, source="measured here at first use")


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the CPUs that were measured."""
    names: list[str] = []
    monkeypatch.setattr(place, "this_cpu", lambda name: names.append(name) or CHIP)
    return names


def test_a_cpu_is_measured_at_first_use_and_known_from_earlier_rows(measured: list[str]) -> None:
    first = find_place()
    assert (first.platform, first.kind, first.chip) == ("cpu", cpu_name(), CHIP)
    assert measured == [cpu_name()]
    again = find_place([first.device()])
    assert again == first
    assert len(measured) == 1
    other = first.device() | {"kind": "another CPU"}
    find_place([other])
    assert len(measured) == 2


def test_host_devices_share_the_machine_and_chips_do_not() -> None:
    cpu, tpu = (Place(platform, "k", 8, CHIP, {}) for platform in ("cpu", "tpu"))
    assert cpu.chip_of(4).device_memory_speed == 4e9
    assert cpu.chip_of(1).flops_of("float32") == 8e9
    assert tpu.chip_of(4).device_memory_speed == 16e9


@pytest.mark.parametrize(("kind", "known"), [("TPU v4", True), ("TPU v77", False)])
def test_an_accelerator_is_looked_up_and_not_measured(
    kind: str, known: bool, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice("tpu", kind)])
    found = find_place()
    assert (found.kind, found.chip.known, measured) == (kind, known, [])
    assert found.device()["chip"]["name"] == ("v4" if known else kind)


def test_measuring_gives_every_figure_that_bounds_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_engine.profiling.host_speed.STREAM_BYTES", 2**20)
    monkeypatch.setattr("inference_engine.profiling.host_speed.MATMUL_SIZE", 64)
    chip = this_cpu("this one")
    assert chip.name == "this one"
    assert set(chip.flops) == {"float32", "bfloat16"}
    assert chip.memory_speed is not None
    assert min(chip.memory_speed, *chip.flops.values()) > 0
    assert chip.memory_bytes is not None
    assert chip.memory_bytes > 2**28
    assert chip.links is None


def test_the_best_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_engine.profiling.host_speed.MATMUL_SIZE", 64)
    speed = MatmulSpeed("bfloat16")
    samples = [speed.sample() for _ in range(3)]
    assert speed.best == max(samples)


def test_versions_name_what_decides_how_fast_a_program_is() -> None:
    assert set(versions()) == {"python", "jax", "jaxlib"}
    assert versions()["jax"] == importlib.metadata.version("jax")
