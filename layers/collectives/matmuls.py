"""The two collective matmuls, in whichever mode a configuration asks for.

For N chips on an axis, each with its own shard and its own weight of N chunks:

  allgather_matmul       out = Σᵢ xᵢ @ w[i]          xᵢ is chip i's x; w, out are this chip's
  matmul_reducescatter   outᵢ = Σ over chips x @ w[i]   chip i gets the sum of everyone's product i

They join a matmul to the collective in front of it or behind it, so that a ring can run both at once.
All modes read the same stored weight, in canonical chunk order: chunk i belongs to axis index i. So one
copy of the weights serves prefill and decode in different modes.

Both run inside `shard_map` with check_vma=True. Worked example, 2 chips: x₀ = [1], x₁ = [10], and chip 0
holds w = [[[2]], [[3]]]. Its allgather_matmul is 1·2 + 10·3 = 32. If chip 1 holds [[[5]], [[7]]],
matmul_reducescatter gives chip 0 the sum 1·2 + 10·5 = 52 and chip 1 1·3 + 10·7 = 73.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Num

from layers.collectives.latency import allgather_matmul_latency, matmul_reducescatter_latency
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.collectives.one_way import allgather_matmul_one_way, matmul_reducescatter_one_way
from layers.collectives.products import Chunks
from layers.collectives.reference import allgather_matmul_reference, matmul_reducescatter_reference
from layers.collectives.ring import AxisName, Index, Ring, require_varying
from layers.collectives.throughput import allgather_matmul_throughput, matmul_reducescatter_throughput


class Pair(NamedTuple):
    """One mode's two functions; the second also takes the dtype that travels."""

    allgather_matmul: Callable[[Array, Chunks, Ring], Array]
    matmul_reducescatter: Callable[[Array, Chunks, Ring, str], Array]


IMPLEMENTATIONS: dict[CollectiveMode, Pair] = {
    CollectiveMode.REFERENCE: Pair(allgather_matmul_reference, matmul_reducescatter_reference),
    CollectiveMode.ONE_WAY: Pair(allgather_matmul_one_way, matmul_reducescatter_one_way),
    CollectiveMode.THROUGHPUT: Pair(allgather_matmul_throughput, matmul_reducescatter_throughput),
    CollectiveMode.LATENCY: Pair(allgather_matmul_latency, matmul_reducescatter_latency),
}


def allgather_matmul(
    x: Float[Array, "*batch rows"],
    w: Num[Array, "*layers chunks rows cols"],
    axis_name: AxisName,
    config: CollectiveConfig,
    *,
    layer: Index | None = None,
) -> Float32[Array, "*batch cols"]:
    """Σᵢ xᵢ @ w[i] over the chips i of an axis, each chip with its own w.

    Args:
      x: this chip's shard of the contracted dim.
      w: this chip's weight, float or int8 (without its scales), chunk i for the x of axis index i; with
        a leading layers dim if `layer` is given.
      axis_name: a mesh axis, or several as one ring, the first is the major one.
      config: mode; reduce_dtype plays no part here.
      layer: index into the stack.

    Raises:
      ValueError: w does not fit x and the axis, or x is the same on all chips of it.
    """
    ring, chunks = _operands(x, w, axis_name, config, layer)
    require_varying(axis_name, ring.size, x)
    return IMPLEMENTATIONS[config.mode].allgather_matmul(x, chunks, ring)


def matmul_reducescatter(
    x: Float[Array, "*batch rows"],
    w: Num[Array, "*layers chunks rows cols"],
    axis_name: AxisName,
    config: CollectiveConfig,
    *,
    layer: Index | None = None,
) -> Float32[Array, "*batch cols"]:
    """On chip i the sum over the chips of an axis of their x @ w[i].

    Args:
      x: this chip's activations.
      w: this chip's weight, float or int8 (without its scales), chunk i for the columns that belong to
        axis index i; with a leading layers dim if `layer` is given.
      axis_name: a mesh axis, or several as one ring, the first is the major one.
      config: mode, and the dtype in which partial sums travel.
      layer: index into the stack.

    Raises:
      ValueError: w does not fit x and the axis, or the product is the same on all chips of it.
    """
    ring, chunks = _operands(x, w, axis_name, config, layer)
    require_varying(axis_name, ring.size, x, w)
    return IMPLEMENTATIONS[config.mode].matmul_reducescatter(x, chunks, ring, config.reduce_dtype)


def _operands(
    x: Array, w: Array, axis_name: AxisName, config: CollectiveConfig, layer: Index | None
) -> tuple[Ring, Chunks]:
    ring, chunks = Ring.over(axis_name, config.max_unrolled), Chunks(w, layer)
    chunks.check(ring.size, x.shape[-1])
    return ring, chunks
