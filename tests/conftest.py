"""The one place where the tests set up jax, and the fixtures that several test modules share.

Idea: every test runs on eight host devices under the strictest settings jax has, so that an implicit
promotion, an implicit broadcast or a warning is a failure. No test module sets any of this itself: after
each test the settings are compared with the ones below, because a second setting wins silently.

Data flow: this file is imported before any test module → environment → jax configuration → tests.
pyproject.toml adds warnings as errors and the run-time check of shapes and types.

Worked example: `x + y` with x `[2, 3]` and y `[3]` raises here; `x + y.reshape(1, 3)` is what passes.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

# These must stand before jax starts. The tests are defined on host devices also where there is a GPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Compiling is most of what small tests cost: a fifth of the time without optimising what runs for
# milliseconds. Tests of compiled programs and of the default compilation ask for their own options, or run
# the command.
os.environ["XLA_FLAGS"] = " ".join(
    [
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)

import jax
import numpy as np
import pytest

SETTINGS = {
    "jax_num_cpu_devices": 8,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
}
for _name, _value in SETTINGS.items():
    jax.config.update(_name, _value)


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """Fail the test that changes the settings on which every other test relies."""
    yield
    changed = [name for name, value in SETTINGS.items() if getattr(jax.config, name) != value]
    for name in changed:
        jax.config.update(name, SETTINGS[name])
    assert not changed, f"a test changed {', '.join(changed)}; only tests/conftest.py sets them"


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed, new for each test."""
    return np.random.default_rng(20220405)


class CompilationCounter:
    """Programs that XLA compiled since this began to listen."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration_secs: float, **details: str | int) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[CompilationCounter]]:
    """A counter of what XLA compiles inside a `with` block."""

    @contextlib.contextmanager
    def counting() -> Iterator[CompilationCounter]:
        counter = CompilationCounter()
        jax.monitoring.register_event_duration_secs_listener(counter)
        try:
            yield counter
        finally:
            jax.monitoring.unregister_event_duration_listener(counter)

    return counting
