"""The arithmetic of the benchmarks; their timings are nobody's law, what loading holds is one.

Data flow: made-up timings → `Row` → shares and overhead.

Worked example: 400 bytes in a median of 4 s beside a memory speed of 200 bytes/s are a share of a half.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.decode_speed import Row, Timing
from benchmarks.variants import prefill_flops
from configs.models import palm_100m
from tests.extras import NEEDS_SAFETENSORS
from tests.test_imports import REPO


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


@pytest.mark.long
@NEEDS_SAFETENSORS
def test_loading_peaks_below_1_3_times_the_file(tmp_path: Path) -> None:
    """1.03 GB onto 8 host devices, anonymous memory above the process's own after imports."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_memory", str(tmp_path)],
        cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = re.search(r"on devices ([0-9.]+) GB, peak ([0-9.]+) × the file", done.stdout)
    assert line is not None, done.stdout
    assert float(line[1]) == pytest.approx(1.03, abs=0.01)
    assert 1.0 <= float(line[2]) <= 1.3
