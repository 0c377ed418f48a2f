"""Cohere in Hugging Face form; with one kv head it computes PaLM's function.

A parallel block with one shared norm, interleaved rotary over the whole head, a gated feed-forward
part with the non-linearity on `gate_proj`, and logits multiplied by `logit_scale`. Norms have a gain
only and are mean-centred, or root mean square where the config's `norm` says so.

A config is Hugging Face's `config.json`, or a short one of this form, which describes a model whose
norms were exchanged: {"norm": "rms eps 1e-6", "rope": "interleaved", "rope_theta": 10000.0,
"logit_scale": 1.0}. The short form has one kv head unless it names heads.

Worked example: q_proj [64, 48] and k_proj [16, 48] with one kv head say qkv = 16 and 4 heads.
"""

import dataclasses
import re

from checkpoints.key_table import KeyTable, Part, Rule, apply_table, count_layers, identical
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import Activation, Bias, HParams, Norm, Rope, RopePairing

_PREFIX = "model.layers.0."
_DEFAULT_THETA = 500000.0  # transformers' value for a config that has none
_DEFAULT_LOGIT_SCALE = 0.0625
_ACTIVATIONS = {
    "silu": Activation.SWISH_GATED,
    "swish": Activation.SWISH_GATED,
    "gelu": Activation.GELU_ERF_GATED,
    "gelu_new": Activation.GELU_TANH_GATED,
    "gelu_pytorch_tanh": Activation.GELU_TANH_GATED,
}
_NORMS = {"rms": Norm.RMS, "layer": Norm.LAYER}
_LINEAR_BIASES = {"q": Bias.Q, "k": Bias.K, "v": Bias.V, "o": Bias.O}


def matches(named: NamedArrays) -> bool:
    """Whether the names are those of this family: gated, with one norm for each block."""
    has = {"model.embed_tokens.weight", f"{_PREFIX}mlp.gate_proj.weight"} <= named.arrays.keys()
    return has and f"{_PREFIX}post_attention_layernorm.weight" not in named.arrays


def key_table(hparams: HParams) -> KeyTable:
    """The layout of a model of this form."""
    layer = "model.layers.{i}."
    attention = {"q": "heads qkv", "k": "kv_heads qkv", "v": "kv_heads qkv"}
    output = Rule("lm_head.weight", (Part("lm_head", "vocab"),), "embed")
    rules = [
        Rule("model.embed_tokens.weight", (Part("embedding", "vocab"),), "embed"),
        Rule(f"{layer}input_layernorm.weight", (Part("norm_gain", "embed"),)),
        *(
            Rule(f"{layer}self_attn.{name}_proj.weight", (Part(name, rows),), "embed")
            for name, rows in attention.items()
        ),
        Rule(f"{layer}self_attn.o_proj.weight", (Part("o", "embed"),), "heads qkv"),
        Rule(f"{layer}mlp.gate_proj.weight", (Part("w0", "ff"),), "embed"),
        Rule(f"{layer}mlp.up_proj.weight", (Part("w1", "ff"),), "embed"),
        Rule(f"{layer}mlp.down_proj.weight", (Part("w2", "embed"),), "ff"),
        Rule("model.norm.weight", (Part("final_norm_gain", "embed"),)),
    ]
    biases = (attention | {"o": "embed"}).items()
    rules += [
        Rule(f"{layer}self_attn.{name}_proj.bias", (Part(f"{name}_bias", rows),))
        for name, rows in biases
        if _LINEAR_BIASES[name] in hparams.biases
    ]
    if hparams.qk_norm is not None:
        # Gains of [heads, qkv], which are not a concatenation of rows: the second dim is the width.
        rules += [
            Rule(f"{layer}self_attn.q_norm.weight", (Part("q_norm_gain", "heads"),), "qkv"),
            Rule(f"{layer}self_attn.k_norm.weight", (Part("k_norm_gain", "kv_heads"),), "qkv"),
        ]
    if not hparams.tied:
        rules.append(output)
    return KeyTable(
        rules=tuple(rules),
        ignored=(f"{layer}self_attn.rotary_emb.inv_freq", *((output.pattern,) if hparams.tied else ())),
    )


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of a Cohere checkpoint, as lazy views.

    Raises UserError for a form that the config names and that is unsupported, for sizes that disagree,
    for tensors that are missing, unknown or of another shape, and for options that do not apply.
    """
    if options.gamma_offset not in (None, 0):
        raise UserError(f"{named.source}: Cohere has plain norm gains; gamma_offset can only be 0")
    norm, eps = _norm(named)
    heads, kv_heads, qkv = _heads(named)
    vocab, embed = named.matrix_shape("model.embed_tokens.weight")
    ff, _ = named.matrix_shape(f"{_PREFIX}mlp.gate_proj.weight")
    layers = count_layers(named, "model.layers.{i}.input_layernorm.weight")
    named.check_config(
        {"vocab_size": vocab, "hidden_size": embed, "intermediate_size": ff, "num_hidden_layers": layers}
    )
    hparams = HParams(
        layers=layers, embed=embed, ff=ff, heads=heads, kv_heads=kv_heads, qkv=qkv, vocab=vocab,
        norm=norm, norm_eps=eps, rope=Rope(RopePairing.INTERLEAVED, _theta(named)), act=_activation(named),
        qk_norm=norm if f"{_PREFIX}self_attn.q_norm.weight" in named.arrays else None, qk_norm_eps=eps,
        logit_scale=named.number("logit_scale", _DEFAULT_LOGIT_SCALE), biases=_biases(named),
        max_positions=_max_positions(named),
    )  # fmt: skip
    hparams = dataclasses.replace(hparams, tied=_is_tied(named))
    return apply_table(key_table(hparams), named, hparams)


def _norm(named: NamedArrays) -> tuple[Norm, float]:
    """The kind of norm and its epsilon."""
    text = named.config.get("norm")
    if text is None:
        return Norm.LAYER, named.number("layer_norm_eps", 1e-5)
    said = re.fullmatch(r"(rms|layer) eps (\d+(?:\.\d*)?(?:e-?\d+)?)", str(text))
    if said is None:
        raise UserError(
            f"{named.source}: the config says norm={text!r}; expected 'rms eps 1e-6' or 'layer eps 1e-5'"
        )
    return _NORMS[said[1]], float(said[2])


def _heads(named: NamedArrays) -> tuple[int, int, int]:
    """heads, kv_heads and qkv, from the config where it has them, else for one kv head."""
    q_rows, embed = named.matrix_shape(f"{_PREFIX}self_attn.q_proj.weight")
    kv_rows, _ = named.matrix_shape(f"{_PREFIX}self_attn.k_proj.weight")
    if named.config.get("num_attention_heads") is None:
        if named.config.get("model_type") is not None:
            raise UserError(f"{named.source}: the config has no num_attention_heads")
        heads, kv_heads, qkv = q_rows // kv_rows, 1, kv_rows
    else:
        heads = named.integer("num_attention_heads", 1)
        kv_heads = named.integer("num_key_value_heads", heads)
        qkv = named.integer("head_dim", max(1, embed // heads))
    if (heads * qkv, kv_heads * qkv) != (q_rows, kv_rows) or heads % kv_heads:
        raise UserError(
            f"{named.source}: {heads} heads and {kv_heads} kv heads of width {qkv} do not fit "
            f"{q_rows} rows of q_proj and {kv_rows} of k_proj"
        )
    return heads, kv_heads, qkv


def _theta(named: NamedArrays) -> float:
    """The rotary base. Raises UserError for another pairing and for scaled rotary."""
    pairing = named.config.get("rope", "interleaved")
    if pairing != "interleaved":
        raise UserError(f"{named.source}: the config says rope={pairing!r}; Cohere's rotary is interleaved")
    nested = named.config.get("rope_parameters") or named.config.get("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default")) if isinstance(nested, dict) else nested
    if kind != "default":
        raise UserError(f"{named.source}: rope type {kind!r} is not supported for Cohere; allowed: 'default'")
    if nested.get("rope_theta") is not None:
        named = dataclasses.replace(named, config={"rope_theta": nested["rope_theta"]})
    return named.number("rope_theta", _DEFAULT_THETA)


def _activation(named: NamedArrays) -> Activation:
    """The feed-forward non-linearity."""
    name = named.config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise UserError(f"{named.source}: hidden_act {name!r} is not supported; allowed: {allowed}")
    return _ACTIVATIONS[name]


def _biases(named: NamedArrays) -> frozenset[Bias]:
    """The attention projections that have a bias: all four or none, in this family."""
    present = f"{_PREFIX}self_attn.q_proj.bias" in named.arrays
    return frozenset(_LINEAR_BIASES.values()) if present else frozenset()


def _max_positions(named: NamedArrays) -> int | None:
    if named.config.get("max_position_embeddings") is None:
        return None
    return named.integer("max_position_embeddings", 1)


def _is_tied(named: NamedArrays) -> bool:
    """Whether the output projection is absent or a copy of the embedding. Reads both if it is there."""
    if "lm_head.weight" not in named.arrays:
        return True
    return identical(named.arrays["model.embed_tokens.weight"], named.arrays["lm_head.weight"])
