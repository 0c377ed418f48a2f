"""Cohere's tensors with a config of a few words, as the oracles have it.

The config describes a Cohere model whose norms were exchanged, which makes it PaLM's function: {"norm": "rms
eps 1e-6", "rope": "interleaved", "rope_theta": 10000.0, "logit_scale": 1.0}. There is one kv head unless it
names heads. Hugging Face's own configs are read by `readers.huggingface`.

Worked example: q_proj [64, 48] and k_proj [16, 48] with one kv head say qkv = 16 and 4 heads.
"""

import re

from checkpoints.key_table import apply_table, count_layers, identical
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.huggingface.decoder_table import decoder_table
from checkpoints.readers.huggingface.parallel_families import cohere_names
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import HParams, Norm, Rope, RopePairing

_PREFIX = "model.layers.0."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NORMS = {"rms": Norm.RMS, "layer": Norm.LAYER}


def matches(named: NamedArrays) -> bool:
    """Whether the names are those of this family: gated, with one norm for each block."""
    has = {_EMBEDDING, f"{_PREFIX}mlp.gate_proj.weight"} <= named.arrays.keys()
    return has and f"{_PREFIX}post_attention_layernorm.weight" not in named.arrays


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of such a checkpoint, as lazy views.

    Raises UserError for a form that the config names and that is unsupported, for sizes that disagree,
    for tensors that are missing, unknown or of another shape, and for options that do not apply.
    """
    if options.gamma_offset not in (None, 0):
        raise UserError(f"{named.source}: Cohere has plain norm gains; gamma_offset can only be 0")
    norm, eps = _norm(named)
    heads, kv_heads, qkv = _heads(named)
    vocab, embed = named.matrix_shape(_EMBEDDING)
    ff, _ = named.matrix_shape(f"{_PREFIX}mlp.gate_proj.weight")
    pairing = named.config.get("rope", "interleaved")
    if pairing != "interleaved":
        raise UserError(f"{named.source}: the config says rope={pairing!r}; Cohere's rotary is interleaved")
    hparams = HParams(
        layers=count_layers(named, "model.layers.{i}.input_layernorm.weight"), embed=embed, ff=ff,
        heads=heads, kv_heads=kv_heads, qkv=qkv, vocab=vocab, norm=norm, norm_eps=eps,
        rope=Rope(RopePairing.INTERLEAVED, named.number("rope_theta", 10000.0)),
        logit_scale=named.number("logit_scale", 1.0), tied=_is_tied(named),
    )  # fmt: skip
    return apply_table(decoder_table(cohere_names(hparams), hparams), named, hparams)


def _norm(named: NamedArrays) -> tuple[Norm, float]:
    """The kind of norm and its epsilon."""
    text = named.config.get("norm")
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


def _is_tied(named: NamedArrays) -> bool:
    """Whether the output projection is absent or a copy of the embedding. Reads both if it is there."""
    return _HEAD not in named.arrays or identical(named.arrays[_EMBEDDING], named.arrays[_HEAD])
