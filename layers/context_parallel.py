"""Context parallelism: a model's own forward pass with its attention exchanged for the ring.

Every layer but attention treats tokens one by one, so that a text can be cut into stretches, one a chip, if
attention alone looks beyond its own. `RingAttend` has the arguments of `attention.attend` and takes its
place in `ForwardOptions`; `ContextParallel` cuts the text, runs a function of it on every chip, and
averages.

Data flow: tokens [batch, time] → [batch, time.axes] → embed, layers with the ring, loss of a stretch → mean.

Worked example: 4,096 tokens on 8 chips: chip 3 runs the model on tokens 1,536 to 2,047 at those positions;
in each layer its keys and values go round in 7 hops.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from layers.attention import AttentionBlocks
from layers.attention_blocks import POSITION, SEGMENT, BlockKernel
from layers.attention_walk import XlaBlocks
from layers.cache_ring import folded_scores, ring_keys, window_bounds
from layers.collectives.ring import AxisName, axis_names
from layers.errors import UserError
from layers.kv_cache import Segment
from layers.ring_attention import AttentionForm, TokenPlaces, ring_attention


@dataclasses.dataclass(frozen=True)
class RingAttend:
    """`attention.attend` over a ring: the segment holds the keys of this chip's tokens alone.

    Attributes:
      axis_name: the axes over which the text is cut, major first.
      kernel: what computes a block; its tiles take the place of `attend`'s blocks.
    """

    axis_name: AxisName
    kernel: BlockKernel = XlaBlocks()

    def __call__(
        self,
        q: Float[Array, "batch time heads qkv"],
        segments: Sequence[Segment],
        q_positions: Int[Array, "batch time"],
        *,
        window: int | jax.Array | None = None,
        cap: float | None = None,
        blocks: AttentionBlocks = AttentionBlocks(),
    ) -> Float[Array, "batch time heads qkv"]:
        """Attention of this chip's queries over the keys of all chips; see `attention.attend`."""
        del blocks
        (segment,) = segments
        keys = ring_keys(segment, 0, segment.keys, q.dtype)
        places = TokenPlaces(
            q_positions=q_positions,
            k_positions=keys.places[:, POSITION],
            k_segments=keys.places[:, SEGMENT],
            bounds=window_bounds(window),
        )
        scores = folded_scores(cap)
        form = AttentionForm(scores.scale, True, soft_cap=scores.cap, kernel=self.kernel)
        return ring_attention(q, keys.k, keys.v, self.axis_name, form, places)


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Texts cut over mesh axes, major first; everything else is the same on all chips."""

    mesh: Mesh
    axes: tuple[str, ...]
    kernel: BlockKernel = XlaBlocks()

    @property
    def chips(self) -> int:
        """Stretches of a text."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def attend(self) -> RingAttend:
        """What takes the place of `attention.attend`."""
        return RingAttend(self.axes, self.kernel)

    def mean(
        self,
        function: Callable[..., Float[Array, ""]],
        params: Any,
        *arrays: Int[Array, "batch time"],
    ) -> Float[Array, ""]:
        """The mean over chips of function(params, position of the first token, *stretches); any params.

        `arrays` are whole texts. One that lies sharded over time already is fine, a chip's stretch of one
        inside `shard_map` is not.

        Raises:
          UserError: the text does not divide into equal stretches.
          ValueError: called where the axes are cut already.
        """
        if set(self.axes) & set(jax.sharding.get_abstract_mesh().manual_axes):
            raise ValueError(f"the text is cut over {', '.join(self.axes)} already; allowed: whole texts")
        (time,) = {array.shape[1] for array in arrays}
        if time % self.chips:
            nearest = max(1, round(time / self.chips)) * self.chips
            raise UserError(
                f"a text of {time} tokens over {self.chips} chips; allowed: multiples of {self.chips}; "
                f"nearest: {nearest}"
            )

        def chip(params: Any, *stretches: jax.Array) -> jax.Array:
            start = lax.axis_index(axis_names(self.axes)) * (time // self.chips)
            return lax.pmean(function(params, start, *stretches), self.axes)

        texts = (P(None, self.axes),) * len(arrays)
        return jax.shard_map(chip, mesh=self.mesh, in_specs=(P(), *texts), out_specs=P())(params, *arrays)
