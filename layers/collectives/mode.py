"""Which form of collective matmul to run, as data; imports no jax, so that planners can read it.

The four modes compute the same two functions (see `layers.collectives.matmuls`) and differ in what
travels when. Hops and bytes of each, for N chips on the axis and a shard of S bytes:

  REFERENCE   one XLA collective, then (or after) one einsum; nothing overlaps by default
  ONE_WAY     N − 1 hops of S in one direction
  THROUGHPUT  N − 1 hops of S/2 in each direction at the same time
  LATENCY     ⌈(N − 1)/2⌉ hop times, each of S in one or both directions

Worked example, N = 4 and S = 1 MB: a chip sends 3 MB on one link under ONE_WAY, 1.5 MB on each of two
links under THROUGHPUT (in 3 hop times), and 2 MB and 1 MB on two links under LATENCY (in 2 hop times).
"""

import dataclasses
import enum


class CollectiveMode(enum.Enum):
    """Form of `allgather_matmul` and `matmul_reducescatter`."""

    REFERENCE = "reference"
    ONE_WAY = "one_way"
    THROUGHPUT = "throughput"
    LATENCY = "latency"


REDUCE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class CollectiveConfig:
    """How the collective matmuls of one step run.

    Attributes:
      mode: see `CollectiveMode`.
      reduce_dtype: the dtype of the partial sums that travel in a reduce-scatter; local products are
        accumulated in float32 whatever it is.
      max_unrolled: rings of more chips than this are rolled loops, which compile in a time that does not
        grow with them.
    """

    mode: CollectiveMode = CollectiveMode.REFERENCE
    reduce_dtype: str = "float32"
    max_unrolled: int = 16

    def __post_init__(self) -> None:
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(
                f"reduce_dtype {self.reduce_dtype!r} is not one of {', '.join(REDUCE_DTYPES)}; "
                "nearest legal: float32"
            )
