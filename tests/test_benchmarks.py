"""The arithmetic of the benchmarks; their timings are nobody's law.

Data flow: made-up timings → `Row` → shares and overhead.

Worked example: 400 bytes in a median of 4 s beside a memory speed of 200 bytes/s are a share of a half.
"""

import pytest

from benchmarks.decode_speed import Row, Timing
from benchmarks.variants import prefill_flops
from configs.models import palm_100m


def row(**medians: list[float]) -> Row:
    timings = {name.replace("_", " "): Timing.of(values) for name, values in medians.items()}
    return Row("m", 1, 400, 0.0, timings, {})


def test_shares_and_overhead_are_of_medians() -> None:
    made = row(bare_step=[1.0, 4.0, 90.0], whole_path=[5.0, 5.0, 5.0])
    assert made.memory_share("bare step", 200.0) == pytest.approx(0.5)
    assert made.overhead == pytest.approx(0.25)


def test_prefill_counts_the_weights_whose_results_are_used() -> None:
    form = palm_100m()
    layer = 768 * (12 * 64 + 2 * 3072) + (12 * 64 + 3072) * 768 + 768 * 128
    assert prefill_flops(form) == 2 * (11 * layer + 768 * 128)
