"""Whole decode steps of PaLM as the real TPU compiler schedules them; nothing runs on a TPU."""

import pytest

from tests.tpu_programs import reports_of

pytestmark = pytest.mark.tpu_compiler


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    found = reports_of("tests.decode_on_tpu", timeout=900, without=("XLA_FLAGS",))
    assert {report["model"] for report in found} == {"palm_8b", "palm_540b"}
    return found


def test_decode_steps_fit_with_little_beside_weights_and_cache(reports: list[dict]) -> None:
    for report in reports:
        assert report["temp_bytes"] <= 0.05 * report["argument_bytes"], report["model"]


def test_the_donated_cache_is_written_in_place(reports: list[dict]) -> None:
    for report in reports:
        assert report["alias_bytes"] >= report["cache_bytes"], report["model"]


def test_no_layers_weights_or_cache_are_copied(reports: list[dict]) -> None:
    for report in reports:
        assert not report["copies"], (report["model"], report["mode"], report["copies"])


def test_rings_have_a_matmul_beside_their_hops(reports: list[dict]) -> None:
    hops = {"reference": 0, "one_way": 6, "throughput": 12, "latency": 6}
    for report in reports:
        covered = sum(hop["matmul_cycles"] > 0 for hop in report["hops"])
        assert len(report["hops"]) == hops[report["mode"]], report["mode"]
        assert covered >= 0.9 * len(report["hops"]), report["mode"]


# The compiler's estimates of a prototype, 8B on v5e: plain, and the dearest of its rings.
PROTOTYPE_CYCLES = {"reference": 166_000, "one_way": 210_000, "throughput": 210_000, "latency": 210_000}


def test_no_mode_is_dearer_than_the_prototype_by_a_tenth(reports: list[dict]) -> None:
    of_64 = [report for report in reports if (report["model"], report["batch"]) == ("palm_8b", 64)]
    found = {report["mode"]: report["cycles"] for report in of_64}
    assert found.keys() == PROTOTYPE_CYCLES.keys()
    for mode, cycles in found.items():
        assert cycles <= 1.1 * PROTOTYPE_CYCLES[mode], mode
