"""Attention in float64 with all scores at once, differentiated automatically: what rings must equal.

Written from the semantics alone: a boolean mask from positions, segments, lengths, causality and window, then
a plain softmax. Nothing of `layers` is used.

Worked example: `mask_of(2, 4, is_causal=True)` lets query 0 see keys 0–2 and query 1 keys 0–3.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@flax.struct.dataclass
class Problem:
    """Arrays of one attention in the order of the text, float32; cotangents of output and log-sum-exp."""

    q: Any
    k: Any
    v: Any
    d_output: Any
    d_lse: Any

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        time: int,
        keys: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        qkv: int = 8,
    ) -> "Problem":
        shapes = ((2, time, heads, qkv), (2, keys, kv_heads, qkv), (2, keys, kv_heads, qkv))
        q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        return cls(
            q,
            k,
            v,
            rng.normal(size=q.shape).astype(np.float32),
            rng.normal(size=q.shape[:3]).astype(np.float32),
        )


def mask_of(
    time: int,
    keys: int,
    *,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_segments: np.ndarray | None = None,
    k_segments: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """[batch, time, keys]: which keys each query sees."""
    query, key = np.arange(time)[:, None] + keys - time, np.arange(keys)[None, :]
    seen = np.ones((time, keys), bool)
    if is_causal:
        seen &= key <= query
    left, right = window
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    seen = np.repeat(seen[None], 2, axis=0)
    if q_segments is not None:
        seen &= (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] >= 0)
    if lengths is not None:
        seen &= (np.arange(keys)[None, :] < lengths[:, None])[:, None, :]
    return seen


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Output and natural log-sum-exp, in the dtype of its inputs."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bthd,bshd->bths", q, k) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    seen = mask[:, :, None, :]
    anything = jnp.any(seen, axis=-1, keepdims=True)
    peak = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - peak, 0.0)), 0.0)
    total = jnp.where(anything, jnp.sum(weights, axis=-1, keepdims=True), 1.0)
    lse = jnp.where(anything, peak + jnp.log(total), -jnp.inf)[..., 0]
    return jnp.einsum("bths,bshd->bthd", weights / total, v), lse


@functools.partial(jax.jit, static_argnums=(0, 1))
def _everything(scale: float, cap: float | None, problem: Problem, mask: jax.Array) -> tuple[jax.Array, ...]:
    output_and_lse, backward = jax.vjp(
        lambda q, k, v: attention(q, k, v, mask, scale, cap), problem.q, problem.k, problem.v
    )
    return *output_and_lse, *backward((problem.d_output, problem.d_lse))


def results(
    problem: Problem, mask: np.ndarray, scale: float | None = None, cap: float | None = None
) -> dict[str, np.ndarray]:
    """output, lse, dq, dk, dv in float64; what a mask hides may hold anything."""
    scale = problem.q.shape[-1] ** -0.5 if scale is None else scale
    keys, rows = mask.any(axis=1)[:, :, None, None], mask.any(axis=2)[:, :, None, None]
    clean = Problem(
        np.where(rows, problem.q, 0),
        np.where(keys, problem.k, 0),
        np.where(keys, problem.v, 0),
        np.where(rows, problem.d_output, 0),
        np.where(rows[..., 0], problem.d_lse, 0),
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), clean)
        found = _everything(scale, cap, wide, jnp.asarray(mask))
        return dict(zip(("output", "lse", "dq", "dk", "dv"), map(np.asarray, found), strict=True))


FORWARD, BACKWARD = 2e-6, 1e-5
TOLERANCE = {"output": FORWARD, "lse": FORWARD, "dq": BACKWARD, "dk": BACKWARD, "dv": BACKWARD}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: object = "") -> None:
    """Within the tolerances, relative to the largest number of an array; empty rows are empty in both."""
    for name, tolerance in TOLERANCE.items():
        a, b = np.asarray(found[name], np.float64), expected[name]
        assert a.shape == b.shape, (what, name)
        if name == "lse":
            assert np.array_equal(np.isneginf(a), np.isneginf(b)), (what, name)
            a, b = np.where(np.isneginf(b), 0, a), np.where(np.isneginf(b), 0, b)
        assert np.all(np.isfinite(a)), (what, name)
        error = np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)
        assert error <= tolerance or np.array_equal(a, b), (what, name, error)
