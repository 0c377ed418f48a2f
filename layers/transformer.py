"""The model on a mesh: the only `shard_map` boundary of a model step, whatever the layout.

`MeshModel` says how a model's weights, cache and logits lie on a mesh; its `forward` and `logits` run inside
the boundary that `sharded` opens, on one chip's arrays. A step (inference_engine.steps) puts what it does
with the logits, sampling say, inside the same boundary, so that no step gathers batch × vocab.

Data flow, inside the boundary:
  tokens [batch, time] → embedding vocab.YZ, embed.X → residual → layers → final norm
  → logits [batch, time, vocab.YZX]

Worked example: the default checkpoint on 2,2,2 in 2D with AXES_YZX and 3 slots: the cache has 8 rows, 5 of
them padding, one a chip; the logits of a step are [3, 1, 256] a chip.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from layers.attn_all_to_all import my_rows, pad_rows
from layers.head_order import KVFactors, padded_form
from layers.hparams import HParams
from layers.kv_cache import CacheShape, KVCache
from layers.layout import CHUNK_AXES, AttentionAxes, ShardingConfig
from layers.layout_ops import LayoutOps, layout_ops
from layers.mesh_shape import MeshShape
from layers.numerics import softcap
from layers.params import LayerParams, Params
from layers.partitioning import cache_specs, param_specs, shardings
from layers.rope import rope_phases
from layers.serial import ForwardOptions, stored_keys, window_table
from layers.sharded_layer import ShardedLayer, StepTokens
from layers.sharded_ops import local_part, sharded_norm
from layers.shared_prefix import SharedPrefixes
from layers.striped_cache import Striping, dealt, gathered, striping, write_index


@dataclasses.dataclass(frozen=True)
class MeshModel:
    """A model's form, a mesh, and how the one lies on the other.

    Attributes:
      hparams: the model as it is, heads not padded.
      shape, mesh: axis sizes and devices.
      sharding: layout, all-to-all and collectives.
      options: dtype of activations and attention's blocks.
    """

    hparams: HParams
    shape: MeshShape
    mesh: Mesh
    sharding: ShardingConfig
    options: ForwardOptions = ForwardOptions()

    @functools.cached_property
    def padded(self) -> HParams:
        """The model with the mesh's padded heads."""
        return padded_form(self.hparams, self.shape)

    @property
    def ops(self) -> LayoutOps:
        """The layout's projections."""
        return layout_ops(self.sharding)

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes of the logits' vocabulary, major first."""
        return CHUNK_AXES

    @property
    def padded_vocab(self) -> int:
        """The vocabulary rounded up to a multiple of the chips."""
        return -(-self.hparams.vocab // self.shape.size) * self.shape.size

    def cache_shape(self, rows: int, time: int) -> CacheShape:
        """The whole cache's sizes for `rows` sequences."""
        heads = self.sharding.attention.heads
        factors = KVFactors.of(self.padded.kv_heads, *self.shape.sizes)
        return CacheShape(
            layers=self.hparams.layers,
            batch=self.sharding.cache_rows(rows, self.shape),
            kv_heads=factors.on_a_chip(heads) * self.shape.over(heads),
            time=self.sharding.cache_positions(time, self.shape),
            qkv=self.hparams.qkv,
        )

    def shared_shape(self, entries: int, time: int) -> CacheShape:
        """Sizes of shared prefixes; no axis splits their rows, positions are padded as the cache's are."""
        return self.cache_shape(1, time)._replace(batch=entries)

    def shared_specs(self, cache: KVCache) -> KVCache:
        """Where shared prefixes lie: by kv heads and positions, on every chip that splits the batch."""
        return cache_specs(cache, self.sharding.attention.whole_rows)

    @property
    def batch_shards(self) -> int:
        """Parts that attention splits the batch into, each with a copy of what is shared."""
        return self.shape.over(self.sharding.attention.batch)

    @property
    def attention(self) -> AttentionAxes:
        """How the cache's rows, heads and positions lie on the mesh."""
        return self.sharding.attention

    @property
    def padded_kv_heads(self) -> int:
        """kv heads as the mesh holds them."""
        return self.padded.kv_heads

    def param_specs(self, params: Params) -> Params:
        """Where each weight lies."""
        return param_specs(params, self.sharding.layout.form.storage)

    def cache_specs(self, cache: KVCache) -> KVCache:
        """Where keys and values lie."""
        return cache_specs(cache, self.sharding.attention)

    def sharded(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of one chip's arrays as a function of whole arrays."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    def placed(self, specs: Any) -> Any:
        """The same tree with shardings for specs."""
        return shardings(self.mesh, specs)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "batch time"],
        start: Int[Array, "*rows"],
        cache: KVCache,
        shared: SharedPrefixes | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One chip's residual after the last layer, and its cache; see `serial.forward` for the arguments.

        tokens, start and the shared lengths are the same on all chips. The residual has
        `ShardingConfig.padded_rows` rows.
        """
        hparams, dtype = self.padded, jnp.dtype(self.options.activation_dtype)
        multiple = self.sharding.padded_rows(1, self.shape)
        tokens = dealt(pad_rows(tokens, multiple), self.shape.over(self.attention.time), 1)
        start = pad_rows(start, multiple) if start.ndim else start
        if shared is None:
            step = self._step_tokens(tokens.shape, start)
        else:
            shared = shared.seen_by(pad_rows(shared.lengths, multiple))
            step = self._step_tokens(tokens.shape, start + shared.offsets)
            step = step._replace(shared=shared.seen_by(self._attention_rows(shared.lengths)))
        step = step._replace(start=self._write_index(start, tokens.shape[1], step.stripes, cache.time))
        k_phases, key_rates = stored_keys(hparams, step.k_phases, cache)
        step = step._replace(k_phases=k_phases, key_rates=key_rates)
        x = self._embed(params, tokens, dtype)
        windows = window_table(hparams)

        def layer(
            index: int | jax.Array,
            weights: LayerParams,
            stacked_at: jax.Array | None,
            x: jax.Array,
            cache: KVCache,
        ) -> tuple[jax.Array, KVCache]:
            block = ShardedLayer(
                hparams, self.ops, self.sharding.attention, self.options.blocks, weights, stacked_at
            )
            window = None if windows is None else jnp.asarray(windows)[index]
            return block(x, cache, step, cache_layer=index, window=window)

        if isinstance(params.layers, tuple):
            for index, weights in enumerate(params.layers):
                x, cache = layer(index, weights, None, x, cache)
            return x, cache
        stack = params.layers
        return lax.fori_loop(
            0, hparams.layers, lambda index, carry: layer(index, stack, index, *carry), (x, cache)
        )

    def _attention_rows(self, x: jax.Array) -> jax.Array:
        """Of all rows `[batch, …]` those that attention gives this chip."""
        attention = self.sharding.attention
        return my_rows(local_part(x, attention.rows, 0), attention)

    def _step_tokens(self, shape: tuple[int, ...], first: jax.Array) -> StepTokens:
        """Positions and phases of this chip's rows and times, in the projections and in attention.

        `shape` is that of the tokens, `first` the position of each row's first one, or of all rows'.
        """
        attention, (batch, time) = self.attention, shape
        first = jnp.broadcast_to(first, (batch,)) if first.ndim == 0 else first
        first = local_part(first, attention.rows, 0)  # of the projections' rows
        order = dealt(jnp.arange(time, dtype=jnp.int32), self.shape.over(attention.time), 0)
        projected = local_part(order, self.sharding.layout.form.stays_split[1], 0)[None, :]
        mine = my_rows(first, attention)
        positions = mine[:, None] + local_part(order, attention.time, 0)[None, :]
        return StepTokens(
            start=mine,
            length=mine + time,
            positions=positions,
            q_phases=rope_phases(self.hparams, first[:, None] + projected),
            k_phases=rope_phases(self.hparams, positions),
            stripes=striping(attention.context),
        )

    def _write_index(
        self, start: jax.Array, time: int, stripes: Striping | None, cache_time: int
    ) -> jax.Array:
        """Where the cache here takes the first token of its rows; `start` is where their own tokens do."""
        mine = start if start.ndim == 0 else self._attention_rows(start)
        return write_index(mine, time, stripes, split=self.attention.ring, end=cache_time)

    @jax.named_scope("residual")
    def _embed(self, params: Params, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The residual of the tokens, a part of the times after the other where chips split the tokens.

        A chip looks up all tokens in its part of the table, of which it keeps a few: in parts, what it looks
        up at once is no larger than what it keeps.
        """
        form, (batch, time) = self.sharding.layout.form, tokens.shape
        shards = self.shape.over(form.time)
        parts = math.gcd(self.shape.over(form.gathered), time // shards)
        if parts == 1:
            return self._look_up(params, tokens, dtype)
        # [batch, time shards, parts, times] → [parts, batch, time shards · times]
        cut = jnp.moveaxis(tokens.reshape(batch, shards, parts, -1), 2, 0).reshape(parts, batch, -1)
        found = lax.map(lambda part: self._look_up(params, part, dtype), cut)  # [parts, rows, times, embed]
        return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1, found.shape[3])

    def _look_up(self, params: Params, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Rows of the vocabulary shards, in the residual's sharding."""
        table = params.embedding  # [vocab.YZ, embed.X]
        local = tokens - lax.axis_index(("y", "z")) * table.shape[0]
        held = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(held, local, 0), axis=0).astype(dtype)
        rows = jnp.where(held[:, :, None], rows, jnp.zeros_like(rows))  # {y, z unreduced}
        x = self.ops.reduce_embedding(rows)
        scale = self.hparams.embed_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, dtype)

    @jax.named_scope("weights")
    def logits(self, params: Params, x: jax.Array, rows: int) -> Float[Array, "batch time vocab"]:
        """Float32 logits of this chip's part of the vocabulary (in y, z, x order) from its residual.

        Of the residual's rows, padding included, the first `rows` are the batch.
        """
        hparams = self.hparams
        whole = self.ops.to_embed_x(x)[:rows]  # [batch, time, embed.X]
        whole = gathered(whole, self.shape.over(self.attention.time), 1)
        n = sharded_norm(whole, params.final_norm, hparams.norm, hparams.norm_eps, ("x",))
        table = params.embedding if params.lm_head is None else params.lm_head  # [vocab.YZ, embed.X]
        partial = jnp.einsum("bte,ve->btv", n, table.astype(n.dtype), preferred_element_type=jnp.float32)
        # [batch, time, vocab.YZ] {x unreduced} → vocab.YZX; logits always travel in float32
        logits = lax.psum_scatter(partial, "x", scatter_dimension=2, tiled=True) * hparams.logits_multiplier
        if params.lm_head_bias is not None:
            bias = local_part(params.lm_head_bias.astype(jnp.float32), CHUNK_AXES, 0)
            logits = logits + bias[None, None, :] * hparams.logits_multiplier
        return softcap(logits, hparams.logit_softcap)


LOGITS_SPEC = P(None, None, CHUNK_AXES)
"""[batch, time, vocab] as `MeshModel.logits` leaves it."""
