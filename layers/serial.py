"""The model on one device: no mesh, no collectives. The oracle of every layout, and what runs without one.

A layer is written once and serves every form of `HParams`: the parallel block with fused projections
(PaLM), the parallel block with two norms, and the serial block, with or without norms after its branches.

Data flow, fused parallel block:
  x [batch, time, embed] → n = norm(x) → n·wi = q | k | v | W0 | W1 columns
  → rope, k and v into the cache, attention → a [batch, time, heads·qkv]; m = act(W0) * W1
  → x + [a | m]·wo.

Worked example: PaLM 8B at batch 1, time 1: n [1, 1, 4096], n·wi [1, 1, 4096 + 512 + 32768], a 4096 wide,
m 16384 wide, [a | m]·wo [1, 1, 4096].
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layers.attention import AttentionBlocks, attend
from layers.embedding import embed
from layers.hparams import Block, HParams, NormPlacement
from layers.kv_cache import KVCache, Segment
from layers.norm import NormParams, apply_norm
from layers.numerics import ff_hidden, project
from layers.params import LayerParams, Params, layer_params
from layers.rope import (
    RopePhases,
    apply_rope_to_keys,
    apply_rope_to_queries,
    rope_phases,
    unstretched,
    xpos_key_rates,
)
from layers.shared_prefix import SharedPrefixes, attended


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How a forward pass computes, apart from what: dtype of activations and block sizes of attention."""

    activation_dtype: str = "float32"
    blocks: AttentionBlocks = AttentionBlocks()


@runtime_checkable
class Attention(Protocol):
    """What `attention.attend` is: attention of queries over segments of keys."""

    def __call__(
        self,
        q: Float[Array, "batch time heads qkv"],
        segments: Sequence[Segment],
        q_positions: Int[Array, "batch time"],
        *,
        window: int | jax.Array | None,
        cap: float | None,
        blocks: AttentionBlocks,
    ) -> Float[Array, "batch time heads qkv"]:
        """Output in q's dtype."""


class _Tokens(NamedTuple):
    """What every layer needs to know of this step's tokens."""

    positions: jax.Array  # [batch, time]
    start: jax.Array  # [] or [batch]: where the cache takes the first token
    q_phases: RopePhases | None
    k_phases: RopePhases | None
    key_rates: jax.Array | None  # xPos of keys that an int8 cache keeps without it
    shared: SharedPrefixes | None


def forward(
    hparams: HParams,
    params: Params,
    tokens: Int[Array, "batch time"],
    start: Int[Array, "*rows"],
    cache: KVCache | None = None,
    options: ForwardOptions = ForwardOptions(),
    shared: SharedPrefixes | None = None,
    attention: Attention = attend,
) -> tuple[Float[Array, "batch time embed"], KVCache | None]:
    """Residual stream after the last layer, and the cache with the tokens' keys and values written.

    Args:
      tokens: int32; row b holds the tokens at positions start[b], start[b] + 1, …
      start: int32, a scalar for all rows or one position a row.
      cache: what came before, or None to attend within `tokens` alone.
      shared: prefixes that stand before the rows, which see as much of them as it says; positions of the
        tokens, but not `start`, then count from the first of those.
      attention: what attends; with `context_parallel.RingAttend` the text may be cut over chips.

    The caller keeps start + time within the cache. `embedding.unembed` turns the result into logits.
    """
    batch, time = tokens.shape
    first = jnp.broadcast_to(start, (batch,)) if start.ndim == 0 else start
    first = first if shared is None else first + shared.offsets
    positions = first[:, None] + jnp.arange(time, dtype=jnp.int32)[None, :]
    phases = rope_phases(hparams, positions)
    k_phases, key_rates = stored_keys(hparams, phases, cache)
    step = _Tokens(positions, start, phases, k_phases, key_rates, shared)
    x = embed(hparams, params, tokens, jnp.dtype(options.activation_dtype))
    windows = window_table(hparams)

    def layer(
        index: int | jax.Array, x: jax.Array, cache: KVCache | None
    ) -> tuple[jax.Array, KVCache | None]:
        window = None if windows is None else jnp.asarray(windows)[index]
        weights = layer_params(params.layers, index)
        return _layer(hparams, (options, attention), weights, x, cache, step, index=index, window=window)

    if isinstance(params.layers, tuple):
        for index in range(hparams.layers):
            x, cache = layer(index, x, cache)
        return x, cache
    return jax.lax.fori_loop(0, hparams.layers, lambda index, carry: layer(index, *carry), (x, cache))


def stored_keys(
    hparams: HParams, phases: RopePhases | None, cache: KVCache | None
) -> tuple[RopePhases | None, jax.Array | None]:
    """Phases of the keys as a cache holds them, and what is left to do when they are read.

    See `kv_quantization` for why int8 keys are kept before xPos.
    """
    rates = xpos_key_rates(hparams)
    if rates is None or cache is None or not cache.quantized:
        return phases, None
    return unstretched(phases), jnp.asarray(rates)


def window_table(hparams: HParams) -> np.ndarray | None:
    """Window of each layer as int32, with the largest int where a layer sees everything."""
    if all(window is None for window in hparams.windows):
        return None
    unbounded = np.iinfo(np.int32).max // 2
    return np.array([unbounded if w is None else w for w in hparams.windows], np.int32)


def _layer(
    hparams: HParams,
    how: tuple[ForwardOptions, Attention],
    weights: LayerParams,
    x: jax.Array,
    cache: KVCache | None,
    step: _Tokens,
    *,
    index: int | jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, KVCache | None]:
    """One block: x [batch, time, embed] in and out."""
    options, attention = how
    n = apply_norm(x, weights.norm, hparams.norm, hparams.norm_eps)
    q_width = hparams.heads * hparams.qkv
    attention_width = q_width + 2 * hparams.kv_heads * hparams.qkv
    projected = project(n, weights.wi, weights.bi)  # q | k | v, and W0 | W1 of a fused block
    q, keys, values = _queries_keys_values(hparams, weights, projected[..., :attention_width], step)
    segments, cache = _remember(cache, index, keys, values, step)
    a = attention(
        q, segments, step.positions, window=window, cap=hparams.attn_softcap, blocks=options.blocks
    ).reshape(*x.shape[:2], q_width)
    if hparams.fused:
        m = ff_hidden(hparams.act, projected[..., attention_width:])
        return x + project(jnp.concatenate([a, m], axis=-1), weights.wo, weights.bo), cache
    branch = _after(hparams, project(a, weights.wo, weights.bo), weights.post_norm)
    mlp_input = x + branch if hparams.block is Block.SERIAL else x
    n2 = apply_norm(mlp_input, weights.norm2, hparams.norm, hparams.norm_eps)
    m = ff_hidden(hparams.act, project(n2, weights.wi_ff, weights.bi_ff))
    mlp = _after(hparams, project(m, weights.wo_ff, weights.bo_ff), weights.post_norm2)
    return x + branch + mlp, cache


def _after(hparams: HParams, branch: jax.Array, params: NormParams) -> jax.Array:
    """A branch's own norm before its residual add, where the model has one."""
    if hparams.norm_placement is not NormPlacement.PRE_AND_POST:
        return branch
    return apply_norm(branch, params, hparams.norm, hparams.norm_eps)


def _queries_keys_values(
    hparams: HParams, weights: LayerParams, columns: jax.Array, step: _Tokens
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [batch, time, heads, qkv] and k, v [batch, time, kv_heads, qkv], normed and rotated, of q | k | v."""
    heads = columns.reshape(*columns.shape[:2], -1, hparams.qkv)
    q, k, v = jnp.split(heads, [hparams.heads, hparams.heads + hparams.kv_heads], axis=2)
    if hparams.qk_norm is not None:
        q = apply_norm(q, weights.q_norm, hparams.qk_norm, hparams.qk_norm_eps)
        k = apply_norm(k, weights.k_norm, hparams.qk_norm, hparams.qk_norm_eps)
    q = apply_rope_to_queries(q, step.q_phases, hparams.rope)
    return q, apply_rope_to_keys(k, step.k_phases, hparams.rope), v


def _remember(
    cache: KVCache | None, index: int | jax.Array, k: jax.Array, v: jax.Array, step: _Tokens
) -> tuple[list[Segment], KVCache | None]:
    """What to attend over: the cache with these tokens written and what is shared, or these tokens alone."""
    first, length = step.positions[:, 0], step.positions[:, -1] + 1
    if cache is None:
        count = jnp.full_like(length, k.shape[1])
        return [Segment(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), first, count)], None
    cache = cache.write(index, k, v, step.start)
    return attended(cache, index, length, step.shared, step.key_rates), cache
