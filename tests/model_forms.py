"""Small models, one for each form that HParams can say, and weights under which every part matters.

`FORMS` maps a name to HParams; tests are parametrised over it. Names after a family have that family's
form, not its sizes; the others cross choices that no family has put together.

Weights are drawn with power: attention is sharp, branches outweigh the embedded token in the residual,
no gain is one and no bias is zero, so that a wrong scale, position or head moves the logits by far more
than rounding does (`test_reference_power.py` measures it). Soft caps, windows and epsilons of the forms
are small for the same reason.

Worked example: `random_weights(FORMS["palm"], seed=0)["layer_0/q"]` is float32 [48, 4, 16] of standard
deviation 1.5/√48 = 0.217; normed inputs have mean square 1, so q and k entries are near 1.5 and the
scores q·k/√16 near 1.5² = 2.25.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.state import state_spec
from layers.hparams import (
    Activation,
    Bias,
    Block,
    HParams,
    Norm,
    NormPlacement,
    Rope,
    RopePairing,
    RopeScaling,
)  # fmt: skip

BASE = HParams(layers=2, embed=48, ff=96, heads=4, kv_heads=1, qkv=16, vocab=72)

_LAYER_NORM = {"norm": Norm.LAYER, "norm_eps": 1e-5, "norm_bias": True}
_LAYER_NORM_NO_BIAS = {"norm": Norm.LAYER, "norm_eps": 1e-5}
_SERIAL = {"block": Block.SERIAL, "norm_placement": NormPlacement.TWO, "logit_scale": 1.0}
_INTERLEAVED = RopePairing.INTERLEAVED
_QKV_BIASES = frozenset({Bias.Q, Bias.K, Bias.V})
_ALL_BUT_HEAD = frozenset(Bias) - {Bias.LM_HEAD}


def _form(*groups: Mapping[str, Any], **fields: Any) -> HParams:
    """BASE with some fields replaced, the later ones winning."""
    changes: dict[str, Any] = {}
    for group in (*groups, fields):
        changes |= group
    return dataclasses.replace(BASE, **changes)


_PALM_LIKE = {
    "palm": _form(layers=3),
    "palm_pytorch": _form(_LAYER_NORM_NO_BIAS, logit_scale=1.0),
    "palm_rlhf_xpos": _form(_LAYER_NORM_NO_BIAS, logit_scale=1.0, rope=Rope(xpos_scale_base=512.0)),
    "palm_rlhf_qk_norm": _form(
        _LAYER_NORM_NO_BIAS, norm_gain_offset=1, logit_scale=1.0, rope=Rope(xpos_scale_base=512.0),
        qk_norm=Norm.RMS, attn_scale=0.5,
    ),
    "palm_jax": _form(_LAYER_NORM_NO_BIAS, rope=Rope(pairing=_INTERLEAVED), heads=6),
    "cohere": _form(
        _LAYER_NORM_NO_BIAS, heads=8, kv_heads=2, qkv=8, logit_scale=0.0625,
        rope=Rope(pairing=_INTERLEAVED, theta=500000.0),
    ),
    "cohere_plus": _form(
        _LAYER_NORM_NO_BIAS, heads=8, kv_heads=4, logit_scale=0.25, qk_norm=Norm.LAYER, qk_norm_eps=1e-5,
        rope=Rope(pairing=_INTERLEAVED),
    ),
    "cohere_rms_multiquery": _form(logit_scale=1.0, rope=Rope(pairing=_INTERLEAVED)),
    "falcon": _form(_LAYER_NORM, act=Activation.GELU_ERF, logit_scale=1.0, heads=5),
    "falcon_two_norms": _form(
        _LAYER_NORM, norm_placement=NormPlacement.TWO, act=Activation.GELU_ERF, heads=8, kv_heads=2,
        logit_scale=1.0, vocab=65,
    ),
    "gptj": _form(
        _LAYER_NORM, act=Activation.GELU_TANH, kv_heads=4, logit_scale=1.0, tied=False, max_positions=64,
        rope=Rope(pairing=_INTERLEAVED, rotary_dims=8),
        biases=frozenset({Bias.FF_IN, Bias.FF_OUT, Bias.LM_HEAD}),
    ),
    "neox": _form(
        _LAYER_NORM, norm_placement=NormPlacement.TWO, act=Activation.GELU_ERF, kv_heads=4, logit_scale=1.0,
        tied=False, rope=Rope(rotary_dims=4), biases=_ALL_BUT_HEAD, max_positions=64,
    ),
    "phi": _form(
        _LAYER_NORM, act=Activation.GELU_TANH, kv_heads=4, logit_scale=1.0, tied=False,
        rope=Rope(rotary_dims=6), biases=frozenset(Bias),
    ),
    "stablelm_parallel": _form(
        _LAYER_NORM, kv_heads=2, logit_scale=1.0, tied=False, rope=Rope(rotary_dims=4), qk_norm=Norm.LAYER,
    ),
}  # fmt: skip

_SERIAL_FAMILIES = {
    "llama": _form(_SERIAL, tied=False, kv_heads=4),
    "llama3": _form(
        _SERIAL, tied=False, heads=8, kv_heads=2, qkv=8, norm_eps=1e-5, vocab=96,
        rope=Rope(theta=1000.0, scaling=RopeScaling("llama3", factor=8.0, original_positions=64)),
    ),
    "llama_linear": _form(_SERIAL, tied=False, kv_heads=2, rope=Rope(scaling=RopeScaling("linear", 4.0))),
    "mistral": _form(_SERIAL, tied=False, kv_heads=2, windows=(5, 5)),
    "qwen2": _form(_SERIAL, kv_heads=2, biases=_QKV_BIASES, layers=3),
    "qwen3": _form(_SERIAL, heads=6, kv_heads=2, qk_norm=Norm.RMS, tied=False),
    "stablelm": _form(_SERIAL, _LAYER_NORM, kv_heads=4, tied=False, rope=Rope(rotary_dims=4)),
    "starcoder2": _form(
        _SERIAL, _LAYER_NORM, kv_heads=2, act=Activation.GELU_TANH, biases=_ALL_BUT_HEAD, windows=(7, 7),
    ),
    "gemma": _form(
        _SERIAL, norm_gain_offset=1, embed_scale=math.sqrt(48), act=Activation.GELU_TANH_GATED, qkv=24,
    ),
    "gemma2": _form(
        _SERIAL, norm_placement=NormPlacement.PRE_AND_POST, norm_gain_offset=1, embed_scale=math.sqrt(48),
        act=Activation.GELU_TANH_GATED, kv_heads=2, attn_scale=24**-0.5, attn_softcap=3.0,
        logit_softcap=0.8, windows=(4, None, 4), layers=3,
    ),
    "gemma3": _form(
        _SERIAL, norm_placement=NormPlacement.PRE_AND_POST, norm_gain_offset=1, embed_scale=math.sqrt(48),
        act=Activation.GELU_TANH_GATED, kv_heads=2, qk_norm=Norm.RMS, windows=(3, 3, None), layers=3,
        rope=Rope(theta=100000.0),
    ),
}  # fmt: skip

_CROSSES = {
    "nine_heads_grouped": _form(heads=9, kv_heads=3, qkv=8),
    "nine_heads_grouped_serial": _form(_SERIAL, heads=9, kv_heads=3, qkv=12, biases=frozenset({Bias.O})),
    "nine_heads_multiquery": _form(heads=9, qkv=12, act=Activation.GELU_ERF_GATED),
    "one_head": _form(layers=1, heads=1, qkv=8, vocab=64),
    "parallel_pre_and_post": _form(
        _LAYER_NORM, norm_placement=NormPlacement.PRE_AND_POST, heads=6, kv_heads=2, norm_gain_offset=1,
        act=Activation.GELU_ERF_GATED, biases=_ALL_BUT_HEAD,
    ),
    "parallel_two_norms_rms": _form(
        norm_placement=NormPlacement.TWO, kv_heads=2, windows=(None, 6), biases=_QKV_BIASES,
    ),
    "serial_pre_and_post_layer_norm": _form(
        _SERIAL, _LAYER_NORM, norm_placement=NormPlacement.PRE_AND_POST, act=Activation.SWISH_GATED,
        biases=frozenset({Bias.FF_IN, Bias.O}),
    ),
    "gelu_erf_gated_serial": _form(_SERIAL, act=Activation.GELU_ERF_GATED, kv_heads=4, embed_scale=3.0),
    "all_biases_gated_soft_caps": _form(
        biases=frozenset(Bias), tied=False, attn_softcap=2.0, logit_softcap=1.5, logit_scale=0.7, kv_heads=2,
    ),
    "no_rope": _form(rope=None, norm_bias=True, biases=frozenset({Bias.Q, Bias.V, Bias.FF_OUT})),
    "no_rope_qk_norm_soft_caps": _form(
        _SERIAL, rope=None, qk_norm=Norm.LAYER, attn_softcap=2.0, kv_heads=2, tied=False,
    ),
    "xpos_interleaved_partial_scaled": _form(
        kv_heads=2, windows=(6, None), logit_scale=1.0,
        rope=Rope(_INTERLEAVED, 1000.0, rotary_dims=12, xpos_scale_base=64.0,
                  scaling=RopeScaling("linear", 2.0)),
    ),
    "llama3_interleaved_partial": _form(
        _SERIAL, kv_heads=2,
        rope=Rope(_INTERLEAVED, 1000.0, rotary_dims=12,
                  scaling=RopeScaling("llama3", 4.0, low_freq_factor=2.0, high_freq_factor=8.0,
                                      original_positions=128)),
    ),
    "window_of_one": _form(windows=(1, 2), kv_heads=4, biases=_QKV_BIASES),
    "large_epsilons": _form(
        _SERIAL, norm_eps=0.01, qk_norm=Norm.RMS, qk_norm_eps=0.3, kv_heads=2,
        windows=(8, 3), attn_scale=0.4,
    ),
    "large_epsilons_layer_norm": _form(
        norm=Norm.LAYER, norm_eps=0.01, norm_gain_offset=1, qk_norm=Norm.LAYER, qk_norm_eps=0.3,
        qkv=24, biases=_QKV_BIASES,
    ),
}  # fmt: skip

FORMS: dict[str, HParams] = _PALM_LIKE | _SERIAL_FAMILIES | _CROSSES


def random_weights(hparams: HParams, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights of the neutral state; an array depends on the seed, its key and its shape alone."""
    return {key: _draw(hparams, key, shape, seed) for key, shape in state_spec(hparams).items()}


def random_ids(hparams: HParams, batch: int, time: int, seed: int) -> np.ndarray:
    """Token ids [batch, time], int32."""
    return np.random.default_rng([seed, batch, time]).integers(0, hparams.vocab, (batch, time), np.int32)


def _draw(hparams: HParams, key: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    name = key.rpartition("/")[2]
    if name in ("q_norm_gain", "k_norm_gain"):
        return rng.uniform(0.9, 2.1, shape).astype(np.float32)
    if name.endswith("_gain"):
        return (rng.uniform(0.6, 1.4, shape) - hparams.norm_gain_offset).astype(np.float32)
    return (_std(hparams, name) * rng.standard_normal(shape)).astype(np.float32)


def _std(hparams: HParams, name: str) -> float:
    """Standard deviation of a matrix's or bias's entries: 1/√(rows summed over), times its strength."""
    if name.endswith("_bias"):
        return 0.4
    rows = {"o": hparams.heads * hparams.qkv, "w2": hparams.ff}.get(name, hparams.embed)
    strength = {"q": 1.5, "k": 1.5, "o": 2.0, "w0": 1.5, "w2": 2.0}.get(name, 1.0)
    if name == "embedding":  # a scaled embedding would drown the branches
        strength = hparams.embed_scale**-0.75
    return strength / math.sqrt(rows)
