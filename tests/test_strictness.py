"""The tests' own settings are in force: each law here breaks one rule and is caught.

Idea: a suite whose checks are silently off passes everything. pyproject.toml and tests/conftest.py switch
the checks on; this module breaks each of them once.

Worked example: `project` takes x as `Float[Array, "*batch rows"]`; integers raise a type error at run time.
"""

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from layers.numerics import project
from tests.conftest import CompilationCounter


def test_a_wrong_type_or_shape_is_caught() -> None:
    x, weight = jnp.zeros((2, 3)), jnp.zeros((5, 3))
    assert project(x, weight, jnp.zeros(5)).shape == (2, 5)
    with pytest.raises(jaxtyping.TypeCheckError, match="Actual value: i32"):
        project(x.astype(jnp.int32), weight)
    with pytest.raises(jaxtyping.TypeCheckError):
        project(x, weight, jnp.zeros((1, 5)))


@pytest.mark.parametrize("module", ["layers.hparams", "checkpoints.state", "inference_engine"])
def test_every_package_is_checked_at_run_time(module: str) -> None:
    spec = importlib.import_module(module).__spec__
    assert spec is not None
    assert type(spec.loader).__module__.startswith("jaxtyping")


def test_implicit_broadcasts_are_refused() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)


def test_implicit_promotions_are_refused() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.zeros(3, jnp.int32) + jnp.zeros(3, jnp.float32)


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_there_are_eight_host_devices() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_compilations_are_counted_once(
    compilations: Callable[[], AbstractContextManager[CompilationCounter]],
) -> None:
    step = jax.jit(lambda x: x * 3 + 1)
    x = jnp.zeros(7)
    with compilations() as first:
        step(x)
    with compilations() as second:
        step(x)
    assert (first.count, second.count) == (1, 0)
