"""What the TPU compiler makes of ring attention with Pallas kernels: programs for four generations of chips.

Nothing here runs on a TPU. What is checked is the schedule: one instruction stream a chip, in which a hop
that is to cost nothing starts before a kernel and ends after it.
"""

import pytest

from tests.tpu_programs import reports_of

pytestmark = pytest.mark.tpu_compiler
GENERATIONS = ("v4", "v5e", "v5p", "v6e")


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    (found,) = reports_of("tests.ring_on_tpu", timeout=600)
    return found


def test_kernels_compile_for_every_generation(reports: list[dict]) -> None:
    assert {report["generation"] for report in reports} == set(GENERATIONS)
    for report in reports:
        # A block forward in the loop and one after it; backward two kernels before, in and after the loop.
        assert report["kernels"] == 2 + 2 * 3, report["generation"]


def test_a_kernel_lies_beside_every_hop_of_a_loop(reports: list[dict]) -> None:
    for report in reports:
        in_loops = [hop for hop in report["hops"] if hop["in_loop"]]
        assert len(in_loops) == 3 + 5, report["generation"]  # k, v, places; those and dk, dv
        assert all(hop["kernels"] >= 1 for hop in in_loops), (report["generation"], in_loops)


def test_only_the_way_home_is_not_covered(reports: list[dict]) -> None:
    for report in reports:
        after = [hop for hop in report["hops"] if not hop["in_loop"]]
        assert len(after) == 3 + 2 + 2, report["generation"]  # the first on, the last of dk and dv, home
        assert sum(hop["kernels"] == 0 for hop in after) <= 2, (report["generation"], after)


def test_nothing_is_gathered(reports: list[dict]) -> None:
    assert all(report["gathers"] == 0 for report in reports)


def test_memory_is_that_of_inputs_and_outputs(reports: list[dict]) -> None:
    for report in reports:
        bound = 2 * (report["argument_bytes"] + report["output_bytes"])
        assert report["temp_bytes"] <= bound, (report["generation"], report["temp_bytes"], bound)
