"""The neutral state of one model → `Params`: constants folded in, projections fused, dtype set.

Folding happens here, once, and is exact algebra up to float32 rounding:
  softmax  exp(c·q·k) = exp2((c·log2 e·q)·k): c·log2 e goes into the q columns and q's bias. With qk-norm
           the norm would undo a factor on q, so it goes into the norm's gain. With a soft cap the scores
           must stay natural up to the cap, so c goes in alone.
  swish    with y = ½·(n W0), swish(2y) = y·(tanh y + 1): ½ goes into W0 and its bias.
  norm     (x̂ · g) W = x̂ (diag(g) W): a gain goes into the rows of the matrices that read it. Not for
           norms with a bias, nor for int8, whose values were rounded without it: those stay at run time.
On int8 weights the column constants multiply the scales.

Fusing, chunking and the padding and order of heads are the storage's (`checkpoints.storage`).

Everything is `jnp` on the leaves of one layer at a time: a loader jits it into target shardings, a
training loop differentiates through it.

Worked example: qkv 64, no cap: q columns are multiplied by log2(e)/8 = 0.18034.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.state import QuantizedTensor
from checkpoints.storage import OneDevice, Storage
from layers.hparams import Activation, HParams, NormPlacement
from layers.norm import NormParams
from layers.numerics import LOG2_E, SWISH_FOLD
from layers.params import LayerParams, Params
from layers.quantization import Int8Weight, Weight

Leaves = Mapping[str, Any]
"""Arrays, shapes of arrays, or `QuantizedTensor`s of them; before a read, lazy entries."""

ONE_DEVICE = OneDevice()


def query_constant(hparams: HParams) -> float:
    """What is folded into q: the softmax scale, and log2(e) where nothing natural stands between."""
    return hparams.softmax_scale * (1.0 if hparams.attn_softcap is not None else LOG2_E)


def _matrix(entry: Any, rows: int) -> Weight:
    """A kernel as `[rows, columns]` with float32 values or int8 values and float32 scales."""
    if isinstance(entry, QuantizedTensor):
        return Int8Weight(jnp.reshape(entry.qvalue, (rows, -1)), jnp.reshape(entry.scale, -1))
    return jnp.reshape(entry, (rows, -1)).astype(jnp.float32)


def _times_columns(weight: Weight, constant: float) -> Weight:
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.qvalue, weight.scale * constant)
    return weight * constant


def _times_rows(weight: Weight, gain: jax.Array | None) -> Weight:
    return weight if gain is None else weight * gain[:, None]


def _stored(weight: Weight, dtype: jnp.dtype) -> Weight:
    return weight if isinstance(weight, Int8Weight) else weight.astype(dtype)


class _Layer:
    """The leaves of one layer under their short names, with its norms split into folded and kept."""

    def __init__(self, hparams: HParams, leaves: Leaves) -> None:
        self.hparams, self.leaves = hparams, leaves
        self.foldable = not hparams.norm_bias and not isinstance(leaves["q"], QuantizedTensor)

    def vector(self, name: str) -> jax.Array | None:
        """A float32 vector or matrix of the layer that is not a kernel; None where absent."""
        return self.leaves[name].astype(jnp.float32) if name in self.leaves else None

    def norm(self, name: str) -> NormParams:
        """Effective gain and bias of a norm, unfolded."""
        gain = self.vector(f"{name}_gain")
        return NormParams(gain + float(self.hparams.norm_gain_offset), self.vector(f"{name}_bias"))

    def folded_gain(self, name: str) -> jax.Array | None:
        """The gain that goes into the rows of what reads this norm; None where it stays at run time."""
        return self.norm(name).gain if self.foldable else None

    def kept_norm(self, name: str) -> NormParams:
        """What of the norm is left for run time."""
        return NormParams() if self.foldable else self.norm(name)

    def kernel(self, name: str, rows: int, gain: jax.Array | None = None, constant: float = 1.0) -> Weight:
        """A kernel as a matrix with the norm's gain and a constant folded in."""
        weight = _matrix(self.leaves[name], rows)
        return _times_columns(_times_rows(weight, gain), constant)

    def biases(self, storage: Storage, *terms: tuple[str, float, int]) -> jax.Array | None:
        """Biases next to each other as (name, constant, width); zeros for those absent, None if all are."""
        if not any(name in self.leaves for name, _, _ in terms):
            return None
        parts = []
        for name, constant, width in terms:
            bias = self.vector(name)
            parts.append(jnp.zeros((width,)) if bias is None else jnp.reshape(bias, -1) * constant)
        return storage.vectors(parts)

    def summed_biases(self, *names: str) -> jax.Array | None:
        """The sum of the biases that there are."""
        present = [self.vector(name) for name in names if name in self.leaves]
        return sum(present[1:], present[0]) if present else None


def preprocess_layer(
    hparams: HParams, leaves: Leaves, dtype: jnp.dtype, storage: Storage = ONE_DEVICE
) -> LayerParams:
    """One layer's neutral leaves (short names, `q`, `w0`, …) → its `LayerParams` in a storage's order.

    Float kernels come out in `dtype`; int8 ones stay int8. Norm gains, biases and scales are float32.
    """
    hparams, leaves = storage.arrange_heads(hparams, leaves)
    layer = _Layer(hparams, leaves)
    width, kv_width = hparams.heads * hparams.qkv, hparams.kv_heads * hparams.qkv
    constant = query_constant(hparams)
    on_q = 1.0 if hparams.qk_norm is not None else constant
    on_w0 = SWISH_FOLD if hparams.act is Activation.SWISH_GATED else 1.0
    gain = layer.folded_gain("norm")
    ff_gain = gain if hparams.norm_placement is NormPlacement.SHARED else layer.folded_gain("norm2")

    q = layer.kernel("q", hparams.embed, gain, on_q)
    keys_values = [layer.kernel(name, hparams.embed, gain) for name in ("k", "v")]
    wkv = storage.keys_values(keys_values)
    w0 = layer.kernel("w0", hparams.embed, ff_gain, on_w0)
    ff_in = [w0, layer.kernel("w1", hparams.embed, ff_gain)] if hparams.act.gated else [w0]
    o, w2 = layer.kernel("o", width), layer.kernel("w2", hparams.ff)

    q_biases = [("q_bias", on_q, width)]
    ff_biases = [("w0_bias", on_w0, hparams.ff), ("w1_bias", 1.0, hparams.ff)][: len(ff_in)]
    kv_biases = [("k_bias", 1.0, kv_width), ("v_bias", 1.0, kv_width)]
    others: dict[str, Any] = {"norm": layer.kept_norm("norm")}
    if wkv is None:
        queries = [q, *keys_values]
        q_biases += kv_biases
    else:
        queries = [q]
        others |= {"wkv": _stored(wkv, dtype), "bkv": layer.biases(ONE_DEVICE, *kv_biases)}
    if hparams.qk_norm is not None:
        others["q_norm"] = NormParams(layer.vector("q_norm_gain") * constant)
        others["k_norm"] = NormParams(layer.vector("k_norm_gain"))
    if hparams.fused:
        return LayerParams(
            wi=_stored(storage.beside([*queries, *ff_in]), dtype),
            wo=_stored(storage.below([o, w2]), dtype),
            bi=layer.biases(storage, *q_biases, *ff_biases),
            bo=layer.summed_biases("o_bias", "w2_bias"),
            **others,
        )
    if hparams.norm_placement is not NormPlacement.SHARED:
        others["norm2"] = layer.kept_norm("norm2")
    if hparams.norm_placement is NormPlacement.PRE_AND_POST:
        others |= {name: layer.norm(name) for name in ("post_norm", "post_norm2")}
    return LayerParams(
        wi=_stored(storage.beside(queries), dtype),
        wo=_stored(storage.below([o]), dtype),
        wi_ff=_stored(storage.beside(ff_in), dtype),
        wo_ff=_stored(storage.below([w2]), dtype),
        bi=layer.biases(storage, *q_biases),
        bo=layer.summed_biases("o_bias"),
        bi_ff=layer.biases(storage, *ff_biases),
        bo_ff=layer.summed_biases("w2_bias"),
        **others,
    )


def preprocess_ends(
    hparams: HParams, leaves: Leaves, dtype: jnp.dtype, storage: Storage = ONE_DEVICE
) -> dict[str, Any]:
    """What of `Params` is not a layer: embedding, final norm, lm_head and its bias.

    Embedding and lm_head are float in every weights dtype, `dtype` says which.
    """
    gain, bias = leaves["final_norm_gain"], leaves.get("final_norm_bias")
    final_norm = NormParams(
        gain.astype(jnp.float32) + float(hparams.norm_gain_offset),
        None if bias is None else bias.astype(jnp.float32),
    )
    embedding = storage.pad_vocab(leaves["embedding"]).astype(dtype)
    ends = {"embedding": embedding, "final_norm": final_norm}
    if "lm_head" in leaves:
        ends["lm_head"] = storage.pad_vocab(leaves["lm_head"].T).astype(dtype)
    if "lm_head_bias" in leaves:
        ends["lm_head_bias"] = storage.pad_vocab(leaves["lm_head_bias"]).astype(jnp.float32)
    return ends


def layer_leaves(weights: Leaves, layer: int) -> dict[str, Any]:
    """The entries of one layer, without their prefix."""
    prefix = f"layer_{layer}/"
    return {key.removeprefix(prefix): leaf for key, leaf in weights.items() if key.startswith(prefix)}


def stack_layers(layers: Sequence[LayerParams]) -> LayerParams:
    """One `LayerParams` whose leaves carry a leading layers dim."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def preprocess(
    hparams: HParams, weights: Leaves, dtype: jnp.dtype, *, stacked: bool, storage: Storage = ONE_DEVICE
) -> Params:
    """The whole neutral state at once, for tracing (training) and tests; loaders go layer by layer."""
    ends = {key: leaf for key, leaf in weights.items() if "/" not in key}
    layers = tuple(
        preprocess_layer(hparams, layer_leaves(weights, index), dtype, storage)
        for index in range(hparams.layers)
    )
    return Params(
        layers=stack_layers(layers) if stacked else layers, **preprocess_ends(hparams, ends, dtype, storage)
    )
