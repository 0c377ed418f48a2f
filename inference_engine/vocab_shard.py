"""The part of the vocabulary that one chip holds, and reductions over the whole of it.

Sampling never gathers batch × vocab. Every question about the vocabulary is a local reduction over the
shard followed by `pmax` or `psum` over the mesh axes that shard it, so that what travels is a few numbers
a slot. On one device the axes are () and the same code is a plain reduction.

Data flow: logits [slots, vocab_shard] and `VocabShard` → `vocab_max`, `vocab_sum`, `vocab_min` → [slots],
the same on every shard.

Worked example: a vocabulary of 10 over 3 shards is padded to 12. The last shard holds ids 8 to 11, of which
10 and 11 are padding: its logits there count as −inf, so no reduction sees them.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int, Shaped


@flax.struct.dataclass
class VocabShard:
    """One chip's slice of the vocabulary.

    Attributes:
      ids: int32 [vocab_shard], the consecutive token ids of this shard; `size` and above are padding.
      size: tokens in the vocabulary, padding excluded.
      axes: mesh axes that shard the vocabulary, major first; () on one device.
      slot_axes: mesh axes that shard the slots; they only make the chips agree on which work to skip.
    """

    ids: jax.Array
    size: int = flax.struct.field(pytree_node=False)
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False, default=())
    slot_axes: tuple[str, ...] = flax.struct.field(pytree_node=False, default=())


def vocab_shard(
    size: int, width: int, axes: tuple[str, ...] = (), slot_axes: tuple[str, ...] = ()
) -> VocabShard:
    """This chip's `VocabShard` of `width` ids; inside `shard_map` where there are axes.

    The shards stand in the order of `axes`, major first, which is that of `PartitionSpec((*axes,))`.
    """
    first = lax.axis_index(axes) * width if axes else 0
    return VocabShard(jnp.arange(width, dtype=jnp.int32) + first, size, axes, slot_axes)


def vocab_max(values: Shaped[Array, "*slots vocab"], shard: VocabShard) -> Shaped[Array, "*slots"]:
    """Largest value over the whole vocabulary."""
    return lax.pmax(jnp.max(values, axis=-1), shard.axes)


def vocab_min(values: Shaped[Array, "*slots vocab"], shard: VocabShard) -> Shaped[Array, "*slots"]:
    """Smallest value over the whole vocabulary."""
    return lax.pmin(jnp.min(values, axis=-1), shard.axes)


def vocab_sum(values: Shaped[Array, "*slots vocab"], shard: VocabShard) -> Shaped[Array, "*slots"]:
    """Sum over the whole vocabulary, in the values' own dtype."""
    return lax.psum(jnp.sum(values, axis=-1, dtype=values.dtype), shard.axes)


def anywhere(flags: Bool[Array, "*slots"], shard: VocabShard) -> Bool[Array, ""]:
    """Whether a flag is set for any slot of any chip, so that all chips take the same branch.

    `flags` must already be equal on all vocabulary shards.
    """
    flag = jnp.any(flags)
    if not shard.slot_axes:  # inside `shard_map` a collective over no axes refuses what does not vary
        return flag
    return lax.pmax(flag.astype(jnp.int32), shard.slot_axes) > 0


def local_index(
    tokens: Int[Array, " slots"], shard: VocabShard
) -> tuple[Int[Array, " slots"], Bool[Array, " slots"]]:
    """Column of each token in this shard, and whether the shard holds it (the column is 0 where not)."""
    index = tokens - shard.ids[0]
    held = (index >= 0) & (index < shard.ids.shape[0])
    return jnp.where(held, index, 0), held
