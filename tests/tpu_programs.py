"""Runs a module that compiles for TPUs in a process of its own, where the compiler's library may start."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def reports_of(module: str, timeout: float, *, without: tuple[str, ...] = ()) -> list[Any]:
    """The JSON values that `python -m module` prints, one a line; skips the test without the compiler.

    `without` names variables of the environment that the process does not get.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed: pip install libtpu==0.0.42.1")
    kept = {key: value for key, value in os.environ.items() if key not in without}
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPO,
        env=kept | _ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
