"""Whole prefill steps of PaLM as the real TPU compiler makes them; nothing runs on a TPU."""

import pytest

from configs.models import MODELS
from tests.tpu_programs import reports_of

USABLE_BYTES = {"v4": 30.75 * 2**30, "v5e": 15.75 * 2**30}

pytestmark = pytest.mark.tpu_compiler


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return reports_of("tests.prefill_on_tpu", timeout=900, without=("XLA_FLAGS",))


def test_prefill_steps_fit_their_chips(reports: list[dict]) -> None:
    assert {(report["model"], report["layout"]) for report in reports} >= {
        ("palm_540b", "gathered_xyz"), ("palm_540b", "2d"), ("palm_62b", "gathered_xy"),
    }  # fmt: skip
    for report in reports:
        held = report["temp_bytes"] + report["argument_bytes"]
        assert held <= USABLE_BYTES[report["topology"].split(":")[0]], report
        assert report["alias_bytes"] >= report["cache_bytes"], report


def test_temporaries_are_what_the_formula_says_a_layers_activations_take(reports: list[dict]) -> None:
    for report in reports:
        assert report["temp_bytes"] <= 1.1 * report["activation_bytes"], report


def test_gathered_weights_travel_in_rings(reports: list[dict]) -> None:
    for report in reports:
        hops = report["collectives"]["collective-permute"]
        assert (hops > 8) == report["layout"].startswith("gathered"), report


def test_no_array_is_time_by_time(reports: list[dict]) -> None:
    for report in reports:
        rows = max(1, report["batch"] // 64)
        scores = rows * MODELS[report["model"]]().heads * report["time"] ** 2
        assert report["largest_array"] < scores or report["batch"] == 1, report
