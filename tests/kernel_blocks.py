"""Blocks of attention for tests of kernels, and kernels in TPU interpret mode as a process of its own.

TPU interpret mode simulates a TPU's memories, copies and semaphores on the host. It can hang where threads
are few, so it runs with a time limit outside the test process:

    python -m tests.kernel_blocks

Worked example: it prints {"races": 3.1e-07, "on_wait": 3.1e-07}, the largest error in each mode.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from layers.attention_blocks import (
    Block,
    BlockKernel,
    Keys,
    Queries,
    ReferenceBlocks,
    ScoreForm,
    nothing_seen,
    output_gradient,
)
from layers.pallas_blocks import PallasBlocks
from layers.softmax_merge import Partial

FORM, FAR = ScoreForm(0.25), 2**30
NAMES = ("output", "lse", "dq", "dk", "dv")


def make_block(
    rng: np.random.Generator, time: int, keys: int, bounds: tuple[int, int], dtype: str = "float32"
) -> Block:
    """Two rows, one with padding, one with two segments; one kv head with two query heads."""
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, length, heads, 16)), dtype)
        for length, heads in ((time, 2), (keys, 1), (keys, 1))
    )

    def places(length: int, first: int) -> jax.Array:
        at = np.stack([first + np.arange(length)] * 2)
        number = np.arange(length)
        segments = np.stack([np.where(number < length - 3, 0, -1), number > length // 2])
        return jnp.asarray(np.stack([at, segments], axis=1), jnp.int32)

    return Block(
        Queries(q, places(time, keys - time)), Keys(k, v, places(keys, 0)), jnp.asarray(bounds, jnp.int32)
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(kernel: BlockKernel, form: ScoreForm, block: Block, running: Partial) -> tuple[jax.Array, ...]:
    """Forward onto `running`, then backward with made-up cotangents onto a made-up dq."""
    done = kernel.forward(block, form, running)
    d_output, d_lse = jnp.cos(block.queries.q), jnp.full_like(done.lse, 0.3)
    gradient = output_gradient(done.output, done.lse, d_output, d_lse)
    dq = jnp.sin(block.queries.q.astype(jnp.float32))
    return done.output, done.lse, *kernel.backward(block, form, gradient, dq)


def largest_error(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    """Relative to the largest number of each array; infinite where one has an empty row and the other not."""
    errors = []
    for x, y in zip(found, expected, strict=True):
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not np.array_equal(np.isneginf(a), np.isneginf(b)):
            return float("inf")
        a, b = np.where(np.isneginf(a), 0, a), np.where(np.isneginf(b), 0, b)
        errors.append(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    return float(max(errors))


def main() -> None:
    """Two tiles of queries and of keys, causal, in both modes."""
    block = make_block(np.random.default_rng(0), 256, 256, (FAR, 0))
    running = nothing_seen(block.queries.q)
    expected = run(ReferenceBlocks(), FORM, block, running)
    modes = {
        "races": pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
        "on_wait": pltpu.InterpretParams(dma_execution_mode="on_wait"),
    }
    found = {
        name: largest_error(run(PallasBlocks(128, 128, mode), FORM, block, running), expected)
        for name, mode in modes.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
