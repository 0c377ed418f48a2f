"""Families with a serial block: Llama and those that vary it.

Gemma's gains act as 1 + g and its embedded tokens are multiplied by √embed; Gemma 2 norms each branch's
output too, caps scores and logits softly, and alternates windows. Qwen 2 has biases on q, k and v; Qwen 3
norms q and k with one gain for all heads.

Worked example: Mistral 7B's config says `sliding_window` 4096: every layer sees 4,096 keys, the query's own
included.
"""

import math
from typing import Any

from checkpoints.readers.huggingface.common import (
    ATTENTION_BIASES,
    FF_BIASES,
    FULL,
    GATED,
    NO_BIASES,
    QKV_BIASES,
    SERIAL,
    SLIDING,
    sizes,
    windows,
)
from checkpoints.readers.huggingface.config_fields import ConfigFields
from checkpoints.readers.huggingface.decoder_table import DecoderNames
from checkpoints.readers.huggingface.family import Family
from checkpoints.readers.huggingface.rope_fields import rope
from layers.hparams import HParams, Norm, NormPlacement

MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "w0": "mlp.gate_proj",
    "w1": "mlp.up_proj",
    "w2": "mlp.down_proj",
}
NORMS = {"norm": "input_layernorm", "norm2": "post_attention_layernorm"}
_GEMMA2_NORMS = {
    "norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}


def _names(hparams: HParams) -> DecoderNames:
    del hparams
    return DecoderNames(matrices=MATRICES, norms=NORMS)


def _qwen3_names(hparams: HParams) -> DecoderNames:
    del hparams
    return DecoderNames(matrices=MATRICES, norms=NORMS, shared_qk_gain=True)


def _gemma2_names(hparams: HParams) -> DecoderNames:
    del hparams
    return DecoderNames(matrices=MATRICES, norms=_GEMMA2_NORMS)


def _rms_serial(fields: ConfigFields, qkv: int | None = None) -> dict[str, Any]:
    """What the serial families with RMS norms share."""
    shape = sizes(fields, qkv)
    return shape | SERIAL | {
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope(fields, shape["qkv"]),
        "tied": fields.flag("tie_word_embeddings", False),
    }  # fmt: skip


def _llama(fields: ConfigFields) -> dict[str, Any]:
    attention = ATTENTION_BIASES if fields.flag("attention_bias", False) else NO_BIASES
    ff = FF_BIASES if fields.flag("mlp_bias", False) else NO_BIASES
    act = fields.choice("hidden_act", GATED, "silu")
    return _rms_serial(fields) | {"act": act, "biases": attention | ff}


def _mistral(fields: ConfigFields) -> dict[str, Any]:
    form = _rms_serial(fields)
    window, layers = fields.nullable_size("sliding_window", 4096), form["layers"]
    kinds = (FULL if window is None else SLIDING,) * layers
    act = fields.choice("hidden_act", GATED, "silu")
    return form | {"act": act, "windows": windows(fields, layers, window, kinds)}


def _qwen(fields: ConfigFields, qkv: int | None = None) -> dict[str, Any]:
    form = _rms_serial(fields, qkv)
    window, layers = fields.nullable_size("sliding_window", 4096), form["layers"]
    window = window if fields.flag("use_sliding_window", False) else None
    first = fields.number("max_window_layers", 28.0)
    kinds = tuple(SLIDING if window and layer >= first else FULL for layer in range(layers))
    act = fields.choice("hidden_act", GATED, "silu")
    return form | {"act": act, "windows": windows(fields, layers, window, kinds)}


def _qwen2(fields: ConfigFields) -> dict[str, Any]:
    return _qwen(fields) | {"biases": QKV_BIASES}


def _qwen3(fields: ConfigFields) -> dict[str, Any]:
    form = _qwen(fields, qkv=128)
    biases = ATTENTION_BIASES if fields.flag("attention_bias", False) else NO_BIASES
    return form | {"biases": biases, "qk_norm": Norm.RMS, "qk_norm_eps": form["norm_eps"]}


def _gemma(fields: ConfigFields) -> dict[str, Any]:
    form = _rms_serial(fields, qkv=256)
    # Early Gemma configs say gelu and mean its tanh form; hidden_activation, where present, wins.
    tanh = GATED | {"gelu": GATED["gelu_pytorch_tanh"]}
    act = fields.choice("hidden_act", tanh, "gelu_pytorch_tanh")
    if fields.get("hidden_activation") is not None:
        act = fields.choice("hidden_activation", tanh, "gelu_pytorch_tanh")
    return form | {
        "act": act,
        "norm_gain_offset": 1,
        "embed_scale": math.sqrt(form["embed"]),
        "biases": ATTENTION_BIASES if fields.flag("attention_bias", False) else NO_BIASES,
        "tied": fields.flag("tie_word_embeddings", True),
    }


def _gemma2(fields: ConfigFields) -> dict[str, Any]:
    form = _gemma(fields)
    layers, window = form["layers"], fields.size("sliding_window", 4096)
    kinds = tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
    return form | {
        "norm_placement": NormPlacement.PRE_AND_POST,
        "attn_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attn_softcap": fields.nullable_number("attn_logit_softcapping", 50.0),
        "logit_softcap": fields.nullable_number("final_logit_softcapping", 30.0),
        "windows": windows(fields, layers, window, kinds),
    }


SERIAL_FAMILIES = (
    Family("Llama", "llama", "LlamaForCausalLM", _llama, _names),
    Family("Mistral", "mistral", "MistralForCausalLM", _mistral, _names),
    Family("Qwen 2", "qwen2", "Qwen2ForCausalLM", _qwen2, _names),
    Family("Qwen 3", "qwen3", "Qwen3ForCausalLM", _qwen3, _qwen3_names),
    Family("Gemma", "gemma", "GemmaForCausalLM", _gemma, _names),
    Family("Gemma 2", "gemma2", "Gemma2ForCausalLM", _gemma2, _gemma2_names),
)
