"""The two walks round the ring: attention of this chip's queries, and the gradients from its log-sum-exp.

Both are what a chip runs, with every array already this chip's and every place known; `ring_attention`
calls them inside `shard_map`, `ring_partitioning` from a partitioned program. A hop stands in a loop that
is not written out, beside the kernel that needs nothing of it: written out, the compiler may move every hop
in front of every kernel, which takes the memory of an all-gather.

Data flow, forward: (running, keys) → kernel(running, keys) beside hop(keys) → … → running.
Backward, as keys travel once more: dq stays; dk, dv arrive from the chip before, this chip's share is added,
and from the last chip of the walk they go home.

Worked example: 3 chips. Forward: block, hop, block, hop, block. Backward: the same, and dk, dv make 2 hops
with the keys and 1 home.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from layers.attention_blocks import (
    Block,
    BlockKernel,
    Gradients,
    Keys,
    OutputGradient,
    Queries,
    ScoreForm,
    nothing_seen,
)
from layers.collectives.ring import AxisName, Index, Ring
from layers.ring_schedule import Arc
from layers.softmax_merge import Partial

_KeyGradients = tuple[jax.Array, jax.Array]
Travelling = TypeVar("Travelling", Keys, _KeyGradients)


class RingConfig(NamedTuple):
    """The static part of a ring.

    Attributes:
      axis_name: one axis, several, or () for no ring.
      arc: the chunks of keys that are walked.
      scores, kernel: how a block is computed.
      axes_in_order: all axes of the mesh where no `shard_map` says them.
    """

    axis_name: AxisName
    arc: Arc
    scores: ScoreForm
    kernel: BlockKernel
    axes_in_order: tuple[str, ...] | None = None

    @property
    def ring(self) -> Ring:
        """On this chip; its loops are never written out."""
        return Ring.over(self.axis_name, max_unrolled=0, axes_in_order=self.axes_in_order)


def ring_output(config: RingConfig, queries: Queries, keys: Keys, bounds: jax.Array) -> Partial:
    """Output in float32 and log-sum-exp of this chip's queries over the keys of the arc."""
    ring, arc = config.ring, config.arc

    def absorb(running: Partial, keys: Keys) -> Partial:
        return config.kernel.forward(Block(queries, keys, bounds), config.scores, running)

    def step(_: Index, carry: tuple[Partial, Keys]) -> tuple[Partial, Keys]:
        running, keys = carry
        return absorb(running, keys), _hop(ring, keys, 1)

    running = nothing_seen(queries.q)
    if not arc.count:
        return running
    return absorb(*ring.run(step, (running, _hop(ring, keys, arc.start)), 0, arc.count - 1))


def ring_gradients(
    config: RingConfig, queries: Queries, keys: Keys, bounds: jax.Array, gradient: OutputGradient
) -> Gradients:
    """dq, dk, dv of this chip's queries, keys and values, in float32."""
    ring, arc = config.ring, config.arc
    dq = jnp.zeros_like(queries.q, dtype=jnp.float32)

    def share(dq: jax.Array, keys: Keys) -> tuple[jax.Array, _KeyGradients]:
        block = Block(queries, keys, bounds)
        dq, dk, dv = config.kernel.backward(block, config.scores, gradient, dq)
        return dq, (dk, dv)

    def add(dq: jax.Array, travelling: _KeyGradients, keys: Keys) -> tuple[jax.Array, _KeyGradients, Keys]:
        """One block; its dk and dv join those that have come this far with the keys, which go on.

        The sum waits for the keys to be gone: beside the kernels there is time for their hop, beside the sum
        there is not, and the TPU compiler would start it there.
        """
        arrived, onward = _hop(ring, travelling, 1), _hop(ring, keys, 1)
        dq, kv = share(dq, keys)
        arrived, onward = lax.optimization_barrier((arrived, onward))
        return dq, jax.tree.map(jnp.add, arrived, kv), onward

    def step(_: Index, carry: tuple[jax.Array, _KeyGradients, Keys]) -> tuple[jax.Array, _KeyGradients, Keys]:
        return add(*carry)

    if not arc.count:
        return dq, jnp.zeros_like(keys.k, dtype=jnp.float32), jnp.zeros_like(keys.v, dtype=jnp.float32)
    keys = _hop(ring, keys, arc.start)
    dq, travelling = share(dq, keys)
    if arc.count > 1:
        carry = (dq, travelling, _hop(ring, keys, 1))
        dq, travelling, keys = ring.run(step, carry, 1, arc.count - 1)
        arrived = _hop(ring, travelling, 1)
        dq, kv = share(dq, keys)
        travelling = jax.tree.map(jnp.add, arrived, kv)
    return dq, *_hop(ring, travelling, -(arc.start + arc.count - 1))


def _hop(ring: Ring, tree: Travelling, places: int) -> Travelling:
    """All leaves moved on by so many places, none for a whole turn."""
    places %= ring.size
    return jax.tree.map(lambda x: ring.hop(x, places), tree) if places else tree
