"""Runs ring attention over host devices, forward and backward in one compiled program for many masks.

Data flow: a `Problem` in the order of the text → permuted if the ring is in zigzag → `shard_map` over one
axis → output, lse, dq, dk, dv in the order of the text. Mask and window are numbers of the program, so that
a ring is compiled once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from layers.attention_blocks import BlockKernel, ReferenceBlocks
from layers.ring_attention import AttentionForm, TokenPlaces, ring_attention_with_lse
from layers.ring_schedule import Reach, TokenOrder, inverse_zigzag_permutation, zigzag_permutation
from tests.attention_oracle import Problem


def line(chips: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:chips]), ("x",), axis_types=(AxisType.Auto,))


def grid(x: int, y: int) -> Mesh:
    devices = np.array(jax.devices()[: x * y]).reshape(x, y)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@dataclasses.dataclass(frozen=True)
class RingRun:
    """A ring over `axes` of a mesh, the batch over `batch_axes`."""

    mesh: Mesh
    axes: tuple[str, ...] = ("x",)
    batch_axes: tuple[str, ...] = ()
    order: TokenOrder = TokenOrder.CONTIGUOUS
    kernel: BlockKernel = ReferenceBlocks()
    cap: float | None = None

    @property
    def chips(self) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in self.axes]))

    def __call__(
        self,
        problem: Problem,
        reach: Reach,
        *,
        q_segments: np.ndarray | None = None,
        k_segments: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Results in the order of the text."""
        batch, time, keys = *problem.q.shape[:2], problem.k.shape[1]
        q_segments = np.zeros((batch, time)) if q_segments is None else q_segments
        k_segments = np.zeros((batch, keys)) if k_segments is None else k_segments
        lengths = np.full(batch, keys) if lengths is None else lengths
        rows = (problem.q, problem.d_output, problem.d_lse, np.asarray(q_segments, np.int32))
        columns = (problem.k, problem.v, np.asarray(k_segments, np.int32))
        if self.order is TokenOrder.ZIGZAG:
            rows = tuple(x[:, zigzag_permutation(time, self.chips)] for x in rows)
            columns = tuple(x[:, zigzag_permutation(keys, self.chips)] for x in columns)
        bounds = np.array([reach.left, reach.right], np.int32)
        output, lse, dq, dk, dv = compiled(self)(*rows, *columns, np.asarray(lengths, np.int32), bounds)
        found = {"output": output, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        found = {name: np.asarray(x) for name, x in found.items()}
        if self.order is TokenOrder.ZIGZAG:
            return {
                name: x[:, inverse_zigzag_permutation(x.shape[1], self.chips)] for name, x in found.items()
            }
        return found


@functools.cache
def compiled(run: RingRun) -> jax.stages.Wrapped:
    """The jitted program."""
    form = AttentionForm(order=run.order, kernel=run.kernel, soft_cap=run.cap)

    def chip(
        q: jax.Array,
        d_output: jax.Array,
        d_lse: jax.Array,
        q_segments: jax.Array,
        k: jax.Array,
        v: jax.Array,
        k_segments: jax.Array,
        lengths: jax.Array,
        bounds: jax.Array,
    ) -> tuple[jax.Array, ...]:
        places = TokenPlaces(q_segments=q_segments, k_segments=k_segments, key_lengths=lengths, bounds=bounds)
        results, backward = jax.vjp(
            lambda q, k, v: ring_attention_with_lse(q, k, v, run.axes, form, places), q, k, v
        )
        return *results, *backward((d_output, d_lse))

    tokens = P(run.batch_axes or None, run.axes)
    sharded = jax.shard_map(
        chip,
        mesh=run.mesh,
        in_specs=(*[tokens] * 7, P(run.batch_axes or None), P()),
        out_specs=tokens,
    )
    return jax.jit(sharded)


def static_window(
    problem: Problem, mesh: Mesh, is_causal: bool, window: tuple[int, int], kernel: BlockKernel
) -> dict[str, np.ndarray]:
    """The same over axis x with mask and window known when the ring is built, so that it is cut to an arc."""
    form = AttentionForm(is_causal=is_causal, window_size=window, kernel=kernel)

    def chip(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array, d_lse: jax.Array) -> tuple:
        results, backward = jax.vjp(lambda q, k, v: ring_attention_with_lse(q, k, v, "x", form), q, k, v)
        return *results, *backward((d_output, d_lse))

    sharded = jax.jit(jax.shard_map(chip, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")))
    arrays = (problem.q, problem.k, problem.v, problem.d_output, problem.d_lse)
    found = sharded(*map(jnp.asarray, arrays))
    return dict(zip(("output", "lse", "dq", "dk", "dv"), map(np.asarray, found), strict=True))
