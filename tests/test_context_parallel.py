"""Laws of context parallelism: a text cut over chips has one device's loss and gradients."""

import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from layers.attention import AttentionBlocks, attend
from layers.context_parallel import ContextParallel, RingAttend
from layers.errors import UserError
from layers.kv_cache import Segment
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from tests.model_forms import FORMS, random_ids, random_weights
from tests.ring_runs import line
from tests.test_imports import REPO
from training.train import loss_fn

SOME = ("palm", "gemma2", "palm_rlhf_xpos")
REST = [pytest.param(name, marks=pytest.mark.long) for name in FORMS if name not in SOME]


def largest_error(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> float:
    """Of any leaf, relative to it, or to a thousandth of the largest one where it is smaller than that."""
    floor = 1e-3 * max(float(jnp.max(jnp.abs(leaf))) for leaf in expected.values())
    return max(
        float(jnp.max(jnp.abs(found[key] - leaf))) / max(float(jnp.max(jnp.abs(leaf))), floor)
        for key, leaf in expected.items()
    )


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_a_text_over_eight_chips_has_one_devices_loss_and_gradients(name: str) -> None:
    hparams = FORMS[name]
    weights = {key: jnp.asarray(leaf) for key, leaf in random_weights(hparams, 0).items()}
    tokens = jnp.asarray(random_ids(hparams, 2, 41, 0))
    context = ContextParallel(make_mesh(MeshShape(2, 4, 1)), ("y", "x"))

    def step(context: ContextParallel | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        return jax.jit(jax.value_and_grad(lambda w: loss_fn(hparams, w, tokens, context)))(weights)

    (loss, gradients), (expected, expected_gradients) = step(context), step(None)
    assert abs(float(loss) - float(expected)) <= 1e-6 * float(expected)
    assert largest_error(gradients, expected_gradients) <= 1e-5


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 2.0), (5, 2.0)])
def test_the_ring_takes_the_place_of_attend(
    window: int | None, cap: float | None, rng: np.random.Generator
) -> None:
    q = jnp.asarray(rng.normal(size=(2, 12, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 12, 8)), jnp.float32) for _ in range(2))
    positions = jnp.asarray(np.arange(12)[None, :] + np.array([[3], [0]]), jnp.int32)
    whole = Segment(k, v, positions[:, 0], jnp.full(2, 12, jnp.int32))
    expected = attend(q, [whole], positions, window=window, cap=cap)

    def chip(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        own = Segment(k, v, positions[:, 0], jnp.full(2, 4, jnp.int32))
        ring = RingAttend("x")
        return ring(q, [own], positions, window=window, cap=cap, blocks=AttentionBlocks())

    times = (P(None, "x"), P(None, None, "x"), P(None, None, "x"), P(None, "x"))
    found = jax.jit(jax.shard_map(chip, mesh=line(3), in_specs=times, out_specs=P(None, "x")))
    assert np.allclose(found(q, k, v, positions), expected, atol=2e-6)


def _sum(params: dict[str, jax.Array], start: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.mean((tokens + start).astype(jnp.float32)) * params["w"]


def test_a_text_that_lies_sharded_is_not_cut_twice() -> None:
    mesh = line(4)
    context = ContextParallel(mesh, ("x",))
    tokens, params = jnp.arange(16, dtype=jnp.int32).reshape(1, 16), {"w": jnp.ones(())}
    spread = jax.device_put(tokens, NamedSharding(mesh, P(None, "x")))
    whole, sharded = (jax.jit(context.mean, static_argnums=0)(_sum, params, t) for t in (tokens, spread))
    assert float(whole) == float(sharded) == 7.5 + 6.0  # the mean of tokens and of the stretches' starts
    cut = jax.shard_map(
        lambda t: context.mean(_sum, params, t)[None], mesh=mesh, in_specs=P(None, "x"), out_specs=P("x")
    )
    with pytest.raises(ValueError, match="cut over x already; allowed: whole texts"):
        cut(tokens)


def test_a_text_that_does_not_divide_is_refused_with_the_nearest_length() -> None:
    context = ContextParallel(Mesh(np.array(jax.devices()), ("x",)), ("x",))
    with pytest.raises(UserError, match=r"21 tokens over 8 chips; allowed: multiples of 8; nearest: 24"):
        context.mean(_sum, {"w": jnp.ones(())}, jnp.zeros((1, 21), jnp.int32))


@pytest.mark.long
def test_the_training_script_takes_context_parallel(tmp_path: Path) -> None:
    pattern = np.tile(np.arange(7, dtype=np.int32), 60)
    tokens = tmp_path / "tokens.npz"
    np.savez(tokens, train=pattern, validation=pattern[:130], train_bytes=420, validation_bytes=130)
    losses = {}
    for devices in (1, 4):
        out = tmp_path / str(devices)
        words = (
            f"--tokens {tokens} --out {out} --max_steps 1 --time 64 --batch 1 --context_parallel {devices}"
        )
        command = [sys.executable, "-m", "training.train", *words.split()]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[devices] = np.load(out / "state.npz")["embedding"]
    assert math.isclose(losses[1].std(), losses[4].std(), rel_tol=1e-5)
    assert np.max(np.abs(losses[1] - losses[4])) < 1e-3 * np.max(np.abs(losses[1]))


def test_the_training_script_refuses_a_window_that_does_not_divide(tmp_path: Path) -> None:
    pattern = np.zeros(500, np.int32)
    tokens = tmp_path / "tokens.npz"
    np.savez(tokens, train=pattern, validation=pattern, train_bytes=500, validation_bytes=500)
    words = f"--tokens {tokens} --out {tmp_path} --max_steps 1 --time 63 --batch 1 --context_parallel 2"
    command = [sys.executable, "-m", "training.train", *words.split()]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        "a text of 63 tokens over 2 chips; allowed: multiples of 2; nearest: 64"
    )
