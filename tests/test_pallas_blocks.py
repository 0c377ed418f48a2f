"""Laws of the Pallas kernels: they equal the reference block, forward and backward, onto earlier sums.

Most run in Pallas' plain interpreter; one runs in TPU interpret mode, in a process with a time limit. What
the TPU compiler makes of the kernels is in `test_ring_on_tpu.py`.
"""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attention_blocks import ReferenceBlocks, nothing_seen
from layers.pallas_blocks import PallasBlocks
from layers.pallas_tiles import lane_tiles, tile_range
from layers.ring_attention import AttentionForm, ring_attention
from layers.softmax_merge import Partial
from tests.kernel_blocks import FAR, FORM, largest_error, make_block, run
from tests.ring_runs import line
from tests.test_imports import REPO

KERNEL = PallasBlocks(128, 128, interpret=True)
SHAPES = {
    "causal": (256, 256, (FAR, 0), None),
    "ragged": (130, 300, (FAR, 0), None),
    "window": (128, 384, (100, 20), None),
    "soft cap": (128, 128, (FAR, FAR), 1.5),
    "nothing in reach": (128, 256, (-1000, 0), None),
}


@pytest.mark.parametrize(("time", "keys", "bounds", "cap"), SHAPES.values(), ids=SHAPES)
def test_kernels_equal_the_reference(
    time: int, keys: int, bounds: tuple[int, int], cap: float | None, rng: np.random.Generator
) -> None:
    block, others = (make_block(rng, time, keys, b) for b in (bounds, (FAR, FAR)))
    form = dataclasses.replace(FORM, cap=cap)
    nothing = nothing_seen(block.queries.q)
    before = run(ReferenceBlocks(), form, others, nothing)
    for running in (nothing, Partial(*before[:2])):
        found = run(KERNEL, form, block, running)
        assert largest_error(found, run(ReferenceBlocks(), form, block, running)) <= 5e-6


def test_bfloat16_accumulates_in_float32(rng: np.random.Generator) -> None:
    block = make_block(rng, 128, 256, (FAR, FAR), "bfloat16")
    running = nothing_seen(block.queries.q)
    found = run(KERNEL, FORM, block, running)
    assert all(x.dtype == jnp.float32 for x in found)
    assert largest_error(found, run(ReferenceBlocks(), FORM, block, running)) <= 1e-2


def test_what_nobody_may_see_reaches_nothing(rng: np.random.Generator) -> None:
    block = make_block(rng, 128, 256, (FAR, FAR))
    running = nothing_seen(block.queries.q)
    segments = block.keys.places[:, 1]
    block = block.replace(
        keys=block.keys.replace(places=block.keys.places.at[1, 1, 7].set(9))  # nobody's segment
    )
    hidden = ((segments == -1) | (block.keys.places[:, 1] == 9))[:, :, None, None]
    keys = block.keys.replace(
        k=jnp.where(hidden, jnp.nan, block.keys.k), v=jnp.where(hidden, jnp.inf, block.keys.v)
    )
    clean, found = (run(KERNEL, FORM, b, running) for b in (block, block.replace(keys=keys)))
    for a, b in zip(found, clean, strict=True):
        assert np.array_equal(a, b)


def test_a_ring_of_kernels_equals_a_ring_of_references(rng: np.random.Generator) -> None:
    q, k = (jnp.asarray(rng.normal(size=(1, 256, heads, 8)), jnp.float32) for heads in (2, 1))

    def loss(q: jax.Array, k: jax.Array, kernel: PallasBlocks | ReferenceBlocks) -> jax.Array:
        form = AttentionForm(is_causal=True, kernel=kernel)
        ring = jax.shard_map(
            lambda q, k: ring_attention(q, k, k, "x", form),
            mesh=line(2),
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
            # The plain interpreter of kernels does not know which values vary over chips.
            check_vma=kernel != KERNEL,
        )
        return jnp.sum(jnp.sin(ring(q, k)))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    found, expected = (jax.tree.leaves(step(q, k, kernel)) for kernel in (KERNEL, ReferenceBlocks()))
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(a, b, atol=1e-5)


def test_kernels_wait_for_their_copies_and_race_nowhere() -> None:
    """Where a copy happens only when it is waited for, a missing wait gives what was there before."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_blocks"],
        cwd=REPO,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RACE DETECTED" not in done.stdout + done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert set(errors) == {"races", "on_wait"}
    assert max(errors.values()) <= 5e-6


def test_tiles_are_multiples_of_the_lanes() -> None:
    found = [(tiles.size, tiles.count) for tiles in (lane_tiles(n, 512) for n in (1, 128, 600, 1024, 5000))]
    assert found == [(128, 1), (128, 1), (512, 2), (512, 2), (512, 10)]


def test_ranges_of_needed_tiles() -> None:
    needed = jnp.asarray([[[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]], bool)
    low, high = tile_range(needed)
    assert low.tolist() == [[1, 0, 0]]
    assert high.tolist() == [[3, 4, 0]]
