"""Prefixes that are held once and attended by many rows.

Samples of one prompt, or prompts that begin alike, need the keys and values of what they share once. An entry
of `SharedPrefixes` is such a run of positions; a row says how many keys of each entry it sees, none of most.
Entries stand one behind the other: a row's own positions begin after all that it shares, so its own cache
holds its own tokens alone. Attention takes each entry as a segment whose batch is one, whatever the number of
rows, and merges it with the row's own segment in one online softmax (attention.py): nothing is copied to the
rows. Nested prefixes are entries that begin where others end.

On a mesh an entry is split by kv heads, and its positions dealt, as those of the rows' cache are; it is on
every chip that splits the batch.

Data flow: prefill of a prefix → `cache_insert.insert_row` → entry → `attended` in each layer of later steps.

Worked example: 8 samples of a prompt of 100 tokens after a system prompt of 400: two entries, at 0 and at
400; each row sees 400 and 100 keys of them and writes its own tokens from position 500 on, at index 0.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from layers.kv_cache import KVCache, Segment
from layers.striped_cache import Striping


@flax.struct.dataclass
class SharedPrefixes:
    """Held prefixes as a step's rows see them.

    The fields are `Any`: a pytree also carries shapes, specs and shardings.

    Attributes:
      caches: `KVCache`s whose batches are the entries, one after the other; those of one have the same room.
      starts: int32 [entries], the position of each entry's first key.
      lengths: int32 [rows, entries], the keys of each entry that a row sees.
    """

    caches: Any
    starts: Any
    lengths: Any

    @property
    def offsets(self) -> Int[Array, " rows"]:
        """The position of each row's first own key."""
        return jnp.sum(self.lengths, axis=1)

    def seen_by(self, lengths: Int[Array, "rows entries"]) -> "SharedPrefixes":
        """The same prefixes as other rows see them."""
        return SharedPrefixes(self.caches, self.starts, lengths)

    def segments(
        self, layer: int | jax.Array, key_rates: jax.Array | None, stripes: Striping | None
    ) -> list[Segment]:
        """One a held prefix, of one layer."""
        found: list[Segment] = []
        for cache in self.caches:
            whole = cache.segment(layer, self.lengths[:, 0], key_rates, stripes)
            for row in range(cache.rows):
                entry = len(found)
                start = jnp.broadcast_to(self.starts[entry], self.lengths.shape[:1])
                length = self.lengths[:, entry]
                found.append(dataclasses.replace(whole, row=row, start=start, length=length))
        return found


def attended(
    cache: KVCache,
    layer: int | jax.Array,
    end: Int[Array, " rows"],
    shared: SharedPrefixes | None,
    key_rates: jax.Array | None,
    stripes: Striping | None = None,
) -> list[Segment]:
    """What the rows attend to in a layer: what they share, and their own keys up to position `end` − 1."""
    if shared is None:
        return [cache.segment(layer, end, key_rates, stripes)]
    own = cache.segment(layer, end - shared.offsets, key_rates, stripes)
    return [*shared.segments(layer, key_rates, stripes), dataclasses.replace(own, start=shared.offsets)]
