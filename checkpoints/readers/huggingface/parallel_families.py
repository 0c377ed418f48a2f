"""Families with a parallel block, and the two that also have serial models: GPT-NeoX and StableLM.

All norms here are mean-centred. Falcon fuses q, k and v by kv head (one group in the 7B form, several with
two norms in the 40B form); GPT-NeoX by query head; GPT-J's rotary is interleaved and its output projection
has a bias; Cohere multiplies logits and has no biases in its norms.

Worked example: Pythia's `rotary_pct` 0.25 of heads of 64 rotates the first 16 dims, pairs (i, i + 8).
"""

from typing import Any

from checkpoints.readers.huggingface.common import (
    ATTENTION_BIASES,
    FF_BIASES,
    GATED,
    NO_BIASES,
    PLAIN,
    QKV_BIASES,
    sizes,
)
from checkpoints.readers.huggingface.config_fields import ConfigFields
from checkpoints.readers.huggingface.decoder_table import DecoderNames
from checkpoints.readers.huggingface.family import Family
from checkpoints.readers.huggingface.rope_fields import rope
from checkpoints.readers.huggingface.serial_families import MATRICES, NORMS
from layers.errors import UserError
from layers.hparams import Bias, Block, HParams, Norm, NormPlacement, Rope, RopePairing

_FUSED_MLP = {"w0": "mlp.dense_h_to_4h", "w2": "mlp.dense_4h_to_h"}
_LAYER_NORM = {"norm": Norm.LAYER, "norm_bias": True}


def cohere_names(hparams: HParams) -> DecoderNames:
    """Cohere's names, which its RMS variant of the oracles shares."""
    del hparams
    return DecoderNames(matrices=MATRICES, norms={"norm": "input_layernorm"})


def _cohere(fields: ConfigFields) -> dict[str, Any]:
    shape, eps = sizes(fields), fields.number("layer_norm_eps", 1e-5)
    return shape | {
        "norm": Norm.LAYER,
        "norm_eps": eps,
        "rope": rope(fields, shape["qkv"], theta=500000.0, pairing=RopePairing.INTERLEAVED),
        "act": fields.choice("hidden_act", GATED, "silu"),
        "qk_norm": Norm.LAYER if fields.flag("use_qk_norm", False) else None,
        "qk_norm_eps": eps,
        "logit_scale": fields.number("logit_scale", 0.0625),
        "biases": ATTENTION_BIASES if fields.flag("attention_bias", False) else NO_BIASES,
        "tied": fields.flag("tie_word_embeddings", True),
    }


def _falcon(fields: ConfigFields) -> dict[str, Any]:
    fields.only("alibi", False)
    embed, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if embed % heads:
        raise UserError(f"{fields.source}: {heads} heads do not divide hidden_size {embed}")
    new, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    multiquery, grouped = fields.flag("multi_query", True), fields.size("num_kv_heads", heads)
    norms = fields.size("num_ln_in_parallel_attn", 2 if new else 1)
    two = norms == 2 and new
    return _LAYER_NORM | {
        "layers": fields.layers("num_hidden_layers"),
        "embed": embed,
        "ff": fields.size("ffn_hidden_size", 4 * embed),
        "heads": heads,
        "kv_heads": grouped if new else 1 if multiquery else heads,
        "qkv": embed // heads,
        "vocab": fields.size("vocab_size"),
        "block": Block.PARALLEL if new or parallel else Block.SERIAL,
        "norm_placement": NormPlacement.TWO if two or not (new or parallel) else NormPlacement.SHARED,
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "rope": rope(fields, embed // heads),
        "act": fields.choice("activation", PLAIN, "gelu"),
        "biases": ATTENTION_BIASES | FF_BIASES if fields.flag("bias", False) else NO_BIASES,
        "tied": fields.flag("tie_word_embeddings", True),
        "max_positions": fields.optional_size("max_position_embeddings"),
        "logit_scale": 1.0,
    }


def _falcon_names(hparams: HParams) -> DecoderNames:
    serial = hparams.block is Block.SERIAL
    one = hparams.norm_placement is NormPlacement.SHARED
    return DecoderNames(
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        layer="transformer.h.{i}.",
        matrices={"o": "self_attention.dense"} | _FUSED_MLP,
        fused_qkv="self_attention.query_key_value",
        norms=NORMS if serial or one else {"norm": "ln_attn", "norm2": "ln_mlp"},
        ignored=("self_attention.rotary_emb.inv_freq",),
    )


def _gptj(fields: ConfigFields) -> dict[str, Any]:
    embed, heads = fields.size("n_embd"), fields.size("n_head")
    return _LAYER_NORM | {
        "layers": fields.layers("n_layer"),
        "embed": embed,
        "ff": fields.size("n_inner", 4 * embed),
        "heads": heads,
        "kv_heads": heads,
        "qkv": embed // heads,
        "vocab": fields.size("vocab_size"),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "rope": Rope(RopePairing.INTERLEAVED, rotary_dims=fields.nullable_size("rotary_dim", 64)),
        "act": fields.choice("activation_function", PLAIN, "gelu_new"),
        "biases": FF_BIASES | {Bias.LM_HEAD},
        "tied": fields.flag("tie_word_embeddings", False),
        "max_positions": fields.size("n_positions", 2048),
        "logit_scale": 1.0,
    }


def _gptj_names(hparams: HParams) -> DecoderNames:
    del hparams
    attention = {name: f"attn.{name}_proj" for name in "qkv"}
    return DecoderNames(
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        layer="transformer.h.{i}.",
        matrices=attention | {"o": "attn.out_proj", "w0": "mlp.fc_in", "w2": "mlp.fc_out"},
        norms={"norm": "ln_1"},
        ignored=("attn.bias", "attn.masked_bias"),
    )


def _neox(fields: ConfigFields) -> dict[str, Any]:
    shape = sizes(fields)
    theta, fraction = fields.number("rotary_emb_base", 10000.0), fields.number("rotary_pct", 0.25)
    parallel = fields.flag("use_parallel_residual", True)
    biases = ATTENTION_BIASES if fields.flag("attention_bias", True) else NO_BIASES
    return shape | _LAYER_NORM | {
        "block": Block.PARALLEL if parallel else Block.SERIAL,
        "norm_placement": NormPlacement.TWO,
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "rope": rope(fields, shape["qkv"], theta, fraction),
        "act": fields.choice("hidden_act", PLAIN, "gelu"),
        "biases": biases | FF_BIASES,
        "tied": fields.flag("tie_word_embeddings", False),
    }  # fmt: skip


def _neox_names(hparams: HParams) -> DecoderNames:
    del hparams
    return DecoderNames(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        other_head="lm_head",
        layer="gpt_neox.layers.{i}.",
        matrices={"o": "attention.dense"} | _FUSED_MLP,
        fused_qkv="attention.query_key_value",
        norms=NORMS,
        ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    )


def _phi(fields: ConfigFields) -> dict[str, Any]:
    fields.only("qk_layernorm", False)
    shape = sizes(fields)
    return shape | _LAYER_NORM | {
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "rope": rope(fields, shape["qkv"], rotary_fraction=0.5),
        "act": fields.choice("hidden_act", PLAIN, "gelu_new"),
        "biases": frozenset(Bias),
        "tied": fields.flag("tie_word_embeddings", False),
    }  # fmt: skip


def _phi_names(hparams: HParams) -> DecoderNames:
    del hparams
    matrices = {name: MATRICES[name] for name in "qkv"}
    return DecoderNames(
        final_norm="model.final_layernorm",
        matrices=matrices | {"o": "self_attn.dense", "w0": "mlp.fc1", "w2": "mlp.fc2"},
        norms={"norm": "input_layernorm"},
    )


def _stablelm(fields: ConfigFields) -> dict[str, Any]:
    fields.only("qk_layernorm", False)
    shape, parallel = sizes(fields), fields.flag("use_parallel_residual", False)
    return shape | _LAYER_NORM | {
        "block": Block.PARALLEL if parallel else Block.SERIAL,
        "norm_placement": NormPlacement.SHARED if parallel else NormPlacement.TWO,
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "rope": rope(fields, shape["qkv"], rotary_fraction=0.25),
        "act": fields.choice("hidden_act", GATED, "silu"),
        "biases": QKV_BIASES if fields.flag("use_qkv_bias", False) else NO_BIASES,
        "tied": fields.flag("tie_word_embeddings", False),
    }  # fmt: skip


def _stablelm_names(hparams: HParams) -> DecoderNames:
    del hparams
    return DecoderNames(matrices=MATRICES, norms=NORMS)


COHERE = Family("Cohere", "cohere", "CohereForCausalLM", _cohere, cohere_names)
PARALLEL_FAMILIES = (
    COHERE,
    Family("Falcon", "falcon", "FalconForCausalLM", _falcon, _falcon_names),
    Family("GPT-J", "gptj", "GPTJForCausalLM", _gptj, _gptj_names),
    Family("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", _neox, _neox_names),
    Family("Phi", "phi", "PhiForCausalLM", _phi, _phi_names),
    Family("StableLM", "stablelm", "StableLmForCausalLM", _stablelm, _stablelm_names),
)
