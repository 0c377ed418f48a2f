"""PaLM-pytorch: numbered `nn.Sequential` keys, no xpos, plain gains.

Key 0 is the embedding, 1 … depth are the blocks, then the final norm and the output projection, which
shares the embedding's memory in the original and is a copy in a file.

Worked example: depth 3 has `0.weight`, `1.fn…` to `3.fn…`, `4.gamma` and `5.weight`.
"""

import dataclasses

from checkpoints.key_table import KeyTable, Part, Rule, apply_table, count_layers
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.palm_common import FUSED_PARTS, is_tied, palm_hparams
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import HParams


def matches(named: NamedArrays) -> bool:
    """Whether the names are those of this family, or of its `palm_lite` sibling."""
    return {"0.weight", "1.fn.fused_attn_ff_proj.weight"} <= named.arrays.keys()


def key_table(hparams: HParams) -> KeyTable:
    """The layout of a model of this form."""
    norm, head = hparams.layers + 1, hparams.layers + 2
    output = Rule(f"{head}.weight", (Part("lm_head", "vocab"),), "embed")
    return KeyTable(
        rules=(
            Rule("0.weight", (Part("embedding", "vocab"),), "embed"),
            Rule("{i}.fn.norm.gamma", (Part("norm_gain", "embed"),)),
            Rule("{i}.fn.fused_attn_ff_proj.weight", FUSED_PARTS, "embed"),
            Rule("{i}.fn.attn_out.weight", (Part("o", "embed"),), "heads qkv"),
            Rule("{i}.fn.ff_out.1.weight", (Part("w2", "embed"),), "ff"),
            Rule(f"{norm}.gamma", (Part("final_norm_gain", "embed"),)),
            *(() if hparams.tied else (output,)),
        ),
        ignored=("{i}.fn.rotary_emb.inv_freq", *((output.pattern,) if hparams.tied else ())),
        zeros=("{i}.fn.norm.beta", f"{norm}.beta"),
        first_layer=1,
    )


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of a PaLM-pytorch checkpoint, as lazy views.

    Raises UserError for `palm_lite`, for tensors that are missing, unknown or of another shape, and for
    options that do not apply.
    """
    if options.gamma_offset not in (None, 0):
        raise UserError(f"{named.source}: PaLM-pytorch has plain norm gains; gamma_offset can only be 0")
    if "1.fn.norm.g" in named.arrays:
        raise UserError(
            f"{named.source}: this is palm_lite (RMS norm, ALiBi, keys and values shared), which is "
            "unsupported; supported: PaLM-pytorch's palm_pytorch model"
        )
    layers = count_layers(named, "{i}.fn.fused_attn_ff_proj.weight", first_layer=1)
    hparams = palm_hparams(named, layers, "1.fn.", "ff_out.1.weight", "0.weight", None, 0)
    tied = is_tied(named, "0.weight", f"{layers + 2}.weight")
    hparams = dataclasses.replace(hparams, tied=tied)
    return apply_table(key_table(hparams), named, hparams)
