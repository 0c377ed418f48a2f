"""One transformer block on this chip, for any layout: the mesh's counterpart of a layer of `serial`.

Data flow, fused parallel block (2D; residual [batch, time, embed.XYZ]):
  gather → n = norm(x) [batch, time, embed.X]
  n·wi → q | W0 | W1 of this chip [batch, time, columns.YZX]; its slice of n · wkv → k, v, reduced
  q [batch, time, heads.YZX, qkv] → attention's sharding (`attn_all_to_all`), cache, attention, and back
  x + [a | m]·wo [batch, time, embed.XYZ]

Worked example: PaLM 540B on 4,4,4, heads padded to 64: a chip has 1 head and 73728/64 = 1152 columns each of
W0 and W1, so n·wi ends with 256 + 2304 columns.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from layers.attention import AttentionBlocks, attend
from layers.attn_all_to_all import gather_rows, my_kv_heads, reduce_kv, scatter_rows
from layers.hparams import Block, HParams, NormPlacement
from layers.kv_cache import KVCache
from layers.layout import CHUNK_AXES, AttnAllToAll
from layers.norm import NormParams, apply_norm
from layers.numerics import ff_hidden, trailing
from layers.params import LayerParams
from layers.quantization import Int8Weight, Weight
from layers.rope import RopePhases, apply_rope_to_keys, apply_rope_to_queries
from layers.sharded_ops import local_part, sharded_norm
from layers.weight_stationary import StationaryOps


class StepTokens(NamedTuple):
    """What every layer needs to know of a step's tokens, for all rows and for attention's rows."""

    start: jax.Array  # [] or [rows]: position of the first token of attention's rows
    positions: jax.Array  # [rows, time] of attention's rows
    q_phases: RopePhases | None  # of all rows
    k_phases: RopePhases | None  # of attention's rows


@dataclasses.dataclass(frozen=True)
class ShardedLayer:
    """One layer's weights on this chip and how to run them.

    `hparams` counts padded heads. With `index` set, the leaves of `weights` are stacks, and matrices are
    indexed by layer and chunk in one slice inside the collective matmuls.
    """

    hparams: HParams
    ops: StationaryOps
    attn_all_to_all: AttnAllToAll
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
        gathered = self.ops.gather(x)  # [batch, time, embed.X]
        n = self._norm(gathered, weights.norm, ("x",))
        projected = self._in(n, weights.wi, weights.bi)  # [batch, time, (q | W0 | W1).YZX]
        q_width = hparams.heads * hparams.qkv // lax.axis_size(CHUNK_AXES)
        q = self._queries(projected[..., :q_width], step)
        keys, values = self._keys_values(n, step)
        cache = cache.write(cache_layer, keys, values, step.start)
        segment = cache.segment(cache_layer, step.positions[:, -1] + 1)
        a = attend(
            scatter_rows(q, self.attn_all_to_all),
            [segment],
            step.positions,
            window=window,
            cap=hparams.attn_softcap,
            blocks=self.blocks,
        )
        a = gather_rows(a, self.attn_all_to_all, x.shape[0]).reshape(*x.shape[:2], q_width)
        if hparams.fused:
            m = ff_hidden(hparams.act, projected[..., q_width:])
            return x + self._out(jnp.concatenate([a, m], axis=-1), weights.wo, weights.bo), cache
        attention = self._after(self._out(a, weights.wo, weights.bo), weights.post_norm)
        mlp = self._mlp(x, gathered, attention)
        return x + attention + mlp, cache

    def _mlp(self, x: jax.Array, gathered: jax.Array, attention: jax.Array) -> jax.Array:
        """The feed-forward branch of a block that is not fused, in the residual's sharding."""
        weights = self.weights
        if self.hparams.block is Block.SERIAL:
            gathered = self.ops.gather(x + attention)
        n = self._norm(gathered, weights.norm2, ("x",))
        m = ff_hidden(self.hparams.act, self._in(n, weights.wi_ff, weights.bi_ff))
        return self._after(self._out(m, weights.wo_ff, weights.bo_ff), weights.post_norm2)

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
        return self._norm(branch, params, self.ops.residual_axes)

    def _in(self, n: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """An input projection: scales and biases are [chunks, columns] and this chip's chunk is (y, z, x)."""
        y = self.ops.project_in(n, _matrix(weight), self.index)
        chunk = lax.axis_index(CHUNK_AXES)
        if isinstance(weight, Int8Weight):
            y = y * trailing(
                lax.dynamic_index_in_dim(self._vector(weight.scale), chunk, keepdims=False), y.ndim
            )
        if bias is not None:
            y = y + trailing(lax.dynamic_index_in_dim(self._vector(bias), chunk, keepdims=False), y.ndim)
        return y.astype(n.dtype)

    def _out(self, h: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """An output projection: scales and biases are [embed] and sliced as the residual is."""
        y = self.ops.project_out(h, _matrix(weight), self.index)
        if isinstance(weight, Int8Weight):
            y = y * trailing(local_part(self._vector(weight.scale), self.ops.residual_axes, 0), y.ndim)
        if bias is not None:
            y = y + trailing(local_part(self._vector(bias), self.ops.residual_axes, 0), y.ndim)
        return y.astype(h.dtype)

    def _queries(self, q: jax.Array, step: StepTokens) -> jax.Array:
        """[batch, time, heads.YZX·qkv] → [batch, time, heads.YZX, qkv], normed and rotated."""
        hparams = self.hparams
        q = q.reshape(*q.shape[:2], -1, hparams.qkv)
        if hparams.qk_norm is not None:
            gain = jax.tree.map(lambda g: local_part(self._vector(g), CHUNK_AXES, 0), self.weights.q_norm)
            q = apply_norm(q, gain, hparams.qk_norm, hparams.qk_norm_eps)
        return apply_rope_to_queries(q, step.q_phases, hparams.rope)

    def _keys_values(self, n: jax.Array, step: StepTokens) -> tuple[jax.Array, jax.Array]:
        """k, v [rows, time, this chip's kv heads, qkv] from n [batch, time, embed.X]."""
        hparams, weights, setting = self.hparams, self.weights, self.attn_all_to_all
        mine = local_part(n, ("y", "z"), 2)  # [batch, time, embed.XYZ]
        matrix = self._vector(_matrix(weights.wkv))
        partial = jnp.einsum(
            "bte,ec->btc", mine, matrix.astype(n.dtype), preferred_element_type=jnp.float32
        ).reshape(*n.shape[:2], 2, hparams.kv_heads, hparams.qkv)
        kv = reduce_kv(partial, setting, self.ops.config.reduce_dtype)
        if isinstance(weights.wkv, Int8Weight):
            kv = kv * self._kv_vector(weights.wkv.scale)
        if weights.bkv is not None:
            kv = kv + self._kv_vector(weights.bkv)
        k, v = kv[:, :, 0].astype(n.dtype), kv[:, :, 1].astype(n.dtype)
        if hparams.qk_norm is not None:
            gain = jax.tree.map(lambda g: my_kv_heads(self._vector(g), setting, 0), weights.k_norm)
            k = apply_norm(k, gain, hparams.qk_norm, hparams.qk_norm_eps)
        return apply_rope_to_keys(k, step.k_phases, hparams.rope), v

    def _kv_vector(self, vector: jax.Array) -> jax.Array:
        """[2·kv_heads·qkv] → [1, 1, 2, this chip's kv heads, qkv]."""
        split = self._vector(vector).reshape(2, self.hparams.kv_heads, self.hparams.qkv)
        return my_kv_heads(split, self.attn_all_to_all, 1)[None, None]


def _matrix(weight: Weight) -> jax.Array:
    return weight.qvalue if isinstance(weight, Int8Weight) else weight
