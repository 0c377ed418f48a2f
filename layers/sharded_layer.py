"""One transformer block on this chip, for any layout: the mesh's counterpart of a layer of `serial`.

Data flow, fused parallel block (2D; residual [batch, time, embed.XYZ]):
  gather → n = norm(x) [batch, time, embed.X]
  n·wi → q | W0 | W1 of this chip [chunks, batch, time, columns]; its slice of n · wkv → k, v, reduced
  q [batch, time, heads.YZX, qkv] → attention's sharding (`attn_all_to_all`), cache, attention, and back
  x + [a | m]·wo [batch, time, embed.XYZ]

Worked example: PaLM 540B on 4,4,4, heads padded to 64: a chip has 1 head and 73728/64 = 1152 columns each of
W0 and W1, so n·wi ends with 256 + 2304 columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from layers.attention import AttentionBlocks, attend
from layers.attention_walk import XlaBlocks
from layers.attn_all_to_all import gather_rows, my_kv_heads, reduce_kv, scatter_rows
from layers.cache_ring import attend_by_ring
from layers.hparams import Block, HParams, NormPlacement
from layers.kv_cache import KVCache, Segment
from layers.layout import CHUNK_AXES, AttentionAxes
from layers.layout_ops import LayoutOps
from layers.norm import NormParams, apply_norm
from layers.numerics import ff_hidden, trailing
from layers.params import LayerParams
from layers.quantization import Int8Weight, Weight
from layers.ring_attention import vary_alike
from layers.rope import RopePhases, apply_rope_to_keys, apply_rope_to_queries
from layers.sharded_ops import held_chunks, local_part, sharded_norm
from layers.shared_prefix import SharedPrefixes, attended
from layers.striped_cache import Striping


class StepTokens(NamedTuple):
    """What every layer needs to know of a step's tokens on this chip.

    Rows and times are those of attention, or of the projections in `q_phases`. Keys are rotated as the cache
    holds them, and `key_rates` is what is left to do.
    """

    start: jax.Array  # [] or [rows]: the index at which the cache here takes the step's first token
    length: jax.Array  # [rows]: positions that are filled after the step
    positions: jax.Array  # [rows, time]
    q_phases: RopePhases | None
    k_phases: RopePhases | None
    key_rates: jax.Array | None = None
    shared: SharedPrefixes | None = None
    stripes: Striping | None = None


class _Columns(NamedTuple):
    """What an input projection becomes, [chunks, batch, time, width] each; m of a fused block alone."""

    q: Any
    m: Any


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """One layer's weights on this chip and how to run them.

    `hparams` counts padded heads. With `index` set, the leaves of `weights` are stacks, and matrices are
    indexed by layer and chunk in one slice inside the collective matmuls.
    """

    hparams: HParams
    ops: LayoutOps
    attention: AttentionAxes
    blocks: AttentionBlocks
    weights: LayerParams
    index: jax.Array | None

    def __call__(
        self,
        x: jax.Array,
        cache: KVCache,
        step: StepTokens,
        *,
        cache_layer: int | jax.Array,
        window: jax.Array | None,
    ) -> tuple[jax.Array, KVCache]:
        """x in the residual's sharding, in and out; the cache with this layer's keys and values written."""
        hparams, weights = self.hparams, self.weights
        gathered = self.ops.gather(x)  # [batch, time, embed.X], or embed whole
        n = self._norm(gathered, weights.norm, self.ops.embed_axes)
        columns = self._in(n, weights.wi, weights.bi)  # q [chunks, batch, time, width], and m if fused
        q = self._queries(columns.q, step)
        keys, values = self._keys_values(n, step)
        cache = cache.write(cache_layer, keys, values, step.start)
        a = self._attend(
            scatter_rows(q, self.attention),
            attended(cache, cache_layer, step.length, step.shared, step.key_rates, step.stripes),
            step.positions,
            window,
        )
        a = _as_chunks(gather_rows(a, self.attention, q.shape[0]), len(columns.q))
        if hparams.fused:
            return x + self._out([a, columns.m], weights.wo, weights.bo), cache
        attention = self._after(self._out([a], weights.wo, weights.bo), weights.post_norm)
        mlp = self._mlp(x, gathered, attention)
        return x + attention + mlp, cache

    def _attend(
        self, q: jax.Array, segments: list[Segment], positions: jax.Array, window: jax.Array | None
    ) -> jax.Array:
        """Attention over keys that are here, or dealt: they go round, or what each chip finds is joined."""
        form = {"window": window, "cap": self.hparams.attn_softcap}
        axes = self.attention.context
        if self.attention.ring and lax.axis_size(axes) > 1:
            kernel = XlaBlocks(self.blocks.queries, self.blocks.keys)
            return attend_by_ring(q, segments, positions, axes, kernel=kernel, **form)
        (q,) = vary_alike(axes, q)  # the same on all chips of the context until it meets their keys
        return attend(q, segments, positions, blocks=self.blocks, axes=axes, **form)

    def _mlp(self, x: jax.Array, gathered: jax.Array, attention: jax.Array) -> jax.Array:
        """The feed-forward branch of a block that is not fused, in the residual's sharding."""
        weights = self.weights
        if self.hparams.block is Block.SERIAL:
            gathered = self.ops.gather(x + attention)
        n = self._norm(gathered, weights.norm2, self.ops.embed_axes)
        m = self._project(n, weights.wi_ff, weights.bi_ff, functools.partial(ff_hidden, self.hparams.act))
        return self._after(self._out([m], weights.wo_ff, weights.bo_ff), weights.post_norm2)

    def _vector(self, vector: jax.Array) -> jax.Array:
        """This layer's entry of a stack of small arrays."""
        if self.index is None:
            return vector
        return lax.dynamic_index_in_dim(vector, self.index, keepdims=False)

    def _norm(self, x: jax.Array, params: NormParams, axes: tuple[str, ...]) -> jax.Array:
        params = jax.tree.map(self._vector, params)
        return sharded_norm(x, params, self.hparams.norm, self.hparams.norm_eps, axes)

    def _after(self, branch: jax.Array, params: NormParams) -> jax.Array:
        """A branch's own norm before its residual add, where the model has one."""
        if self.hparams.norm_placement is not NormPlacement.PRE_AND_POST:
            return branch
        return self._norm(branch, params, self.ops.form.embed)

    def _in(self, n: jax.Array, weight: Weight, bias: jax.Array | None) -> "_Columns":
        """q, and of a fused block the feed-forward hidden layer as well, a group of chunks at a time."""
        hparams = self.hparams
        width = hparams.heads * hparams.qkv // lax.axis_size(CHUNK_AXES)

        def split(y: jax.Array) -> _Columns:
            m = ff_hidden(hparams.act, y[..., width:]) if hparams.fused else None
            return _Columns(y[..., :width], m)

        return self._project(n, weight, bias, split)

    @jax.named_scope("weights")
    def _project(
        self, n: jax.Array, weight: Weight, bias: jax.Array | None, activate: Callable[[jax.Array], Any]
    ) -> Any:
        """An input projection, scaled and biased by what stands beside its chunks, then `activate`d."""
        scale = self._chunk_vectors(weight.scale if isinstance(weight, Int8Weight) else None)
        bias = self._chunk_vectors(bias)

        def finish(products: jax.Array, group: int | jax.Array) -> Any:
            if scale is not None:
                products = products * _beside(scale, group)
            if bias is not None:
                products = products + _beside(bias, group)
            return activate(products.astype(n.dtype))

        return self.ops.project_in(n, _matrix(weight), self.index, finish)

    def _chunk_vectors(self, vector: jax.Array | None) -> jax.Array | None:
        """[chunks of the mesh, width] → [groups, chunks, width] of this chip."""
        return None if vector is None else held_chunks(self._vector(vector), self.ops.form.held)

    @jax.named_scope("weights")
    def _out(self, h: Sequence[jax.Array], weight: Weight, bias: jax.Array | None) -> jax.Array:
        """An output projection: scales and biases are [embed] and sliced as the residual is."""
        y = self.ops.project_out(h, _matrix(weight), self.index)
        if isinstance(weight, Int8Weight):
            y = y * trailing(local_part(self._vector(weight.scale), self.ops.form.embed, 0), y.ndim)
        if bias is not None:
            y = y + trailing(local_part(self._vector(bias), self.ops.form.embed, 0), y.ndim)
        return y.astype(h[0].dtype)

    def _queries(self, q: jax.Array, step: StepTokens) -> jax.Array:
        """[chunks, batch, time, heads of a chunk · qkv] → [batch, time, heads, qkv], normed and rotated."""
        hparams = self.hparams
        q = q.reshape(*q.shape[:3], -1, hparams.qkv)
        q = jnp.moveaxis(q, 0, 2).reshape(*q.shape[1:3], -1, hparams.qkv)
        if hparams.qk_norm is not None:
            gain = jax.tree.map(self._head_gains, self.weights.q_norm)
            q = apply_norm(q, gain, hparams.qk_norm, hparams.qk_norm_eps)
        return apply_rope_to_queries(q, step.q_phases, hparams.rope)

    @jax.named_scope("weights")
    def _keys_values(self, n: jax.Array, step: StepTokens) -> tuple[jax.Array, jax.Array]:
        """k, v [rows, time, this chip's kv heads, qkv] from what the projections read."""
        hparams, weights = self.hparams, self.weights
        partial = self.ops.project_kv(n, self._vector(_matrix(weights.wkv)))
        partial = partial.reshape(*n.shape[:2], 2, hparams.kv_heads, hparams.qkv)
        kv = reduce_kv(partial, self.attention, self.ops.config.reduce_dtype)
        if isinstance(weights.wkv, Int8Weight):
            kv = kv * self._kv_vector(weights.wkv.scale)
        if weights.bkv is not None:
            kv = kv + self._kv_vector(weights.bkv)
        k, v = kv[:, :, 0].astype(n.dtype), kv[:, :, 1].astype(n.dtype)
        if hparams.qk_norm is not None:
            gain = jax.tree.map(lambda g: my_kv_heads(self._vector(g), self.attention, 0), weights.k_norm)
            k = apply_norm(k, gain, hparams.qk_norm, hparams.qk_norm_eps)
        k = apply_rope_to_keys(k, step.k_phases, hparams.rope)
        return k, v

    def _head_gains(self, gain: jax.Array) -> jax.Array:
        """[heads in stored order, qkv] → those of this chip's chunks."""
        chunks = self._vector(gain).reshape(lax.axis_size(CHUNK_AXES), -1)
        return held_chunks(chunks, self.ops.form.held).reshape(-1, gain.shape[-1])

    def _kv_vector(self, vector: jax.Array) -> jax.Array:
        """[2·kv_heads·qkv] → [1, 1, 2, this chip's kv heads, qkv]."""
        split = self._vector(vector).reshape(2, self.hparams.kv_heads, self.hparams.qkv)
        return my_kv_heads(split, self.attention, 1)[None, None]


def _as_chunks(a: jax.Array, chunks: int) -> jax.Array:
    """[batch, time, heads, qkv] → [chunks, batch, time, heads of a chunk · qkv]."""
    return jnp.moveaxis(a.reshape(*a.shape[:2], chunks, -1), 2, 0)


def _beside(vectors: jax.Array, group: int | jax.Array) -> jax.Array:
    """[groups, chunks, width] → float32 [chunks, 1, 1, width] of one group."""
    mine = lax.dynamic_index_in_dim(vectors.astype(jnp.float32), group, keepdims=False)
    return mine[:, None, None, :]


def _matrix(weight: Weight) -> jax.Array:
    return weight.qvalue if isinstance(weight, Int8Weight) else weight
