"""PaLM-rlhf-pytorch: xpos always on, and norm gains whose meaning changed between releases.

Releases up to 0.2.3 multiply by `gamma`, later ones by `gamma + 1`, with the same names and shapes, so
the choice comes from `ReaderOptions` or the config and is never guessed. xpos has scale base 512; the
original centres the exponent at half the sequence, which cancels between a query and a key.

With its optional query and key norm, a head is divided by its length and multiplied by `q_scale`.
Since length = √qkv · root mean square, that is an RMS norm with gain `q_scale / √qkv`; the original
still multiplies scores by 1/√qkv.

Worked example: `layers.2.fn.ff_out.2.weight` [48, 192] is `layer_2/w2` [192, 48].
"""

import dataclasses
import math

import numpy as np

from checkpoints.key_table import KeyTable, Part, Rule, apply_table, count_layers
from checkpoints.lazy import ArrayLike
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.palm_common import FUSED_PARTS, is_tied, palm_hparams
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import HParams, Norm

XPOS_SCALE_BASE = 512.0
# The original divides by max(length, 1e-12): a floor of 1e-24 on the squared length.
_QK_NORM_EPS = 1e-24


def matches(named: NamedArrays) -> bool:
    """Whether the names are those of this family."""
    return {"token_emb.weight", "layers.0.fn.fused_attn_ff_proj.weight"} <= named.arrays.keys()


def key_table(hparams: HParams) -> KeyTable:
    """The layout of a model of this form."""
    output = Rule("to_logits.weight", (Part("lm_head", "vocab"),), "embed")
    qk_norm = (
        Rule("layers.{i}.fn.q_scale", (Part("q_norm_gain", "qkv", _LengthGain("heads")),)),
        Rule("layers.{i}.fn.k_scale", (Part("k_norm_gain", "qkv", _LengthGain("kv_heads")),)),
    )
    return KeyTable(
        rules=(
            Rule("token_emb.weight", (Part("embedding", "vocab"),), "embed"),
            Rule("layers.{i}.fn.norm.gamma", (Part("norm_gain", "embed"),)),
            Rule("layers.{i}.fn.fused_attn_ff_proj.weight", FUSED_PARTS, "embed"),
            Rule("layers.{i}.fn.attn_out.weight", (Part("o", "embed"),), "heads qkv"),
            Rule("layers.{i}.fn.ff_out.2.weight", (Part("w2", "embed"),), "ff"),
            Rule("norm.gamma", (Part("final_norm_gain", "embed"),)),
            *(() if hparams.qk_norm is None else qk_norm),
            *(() if hparams.tied else (output,)),
        ),
        ignored=(
            "layers.{i}.fn.rotary_emb.inv_freq",
            "layers.{i}.fn.rotary_emb.scale",
            *((output.pattern,) if hparams.tied else ()),
        ),
        zeros=("layers.{i}.fn.norm.beta", "norm.beta"),
    )


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of a PaLM-rlhf-pytorch checkpoint, as lazy views.

    Raises UserError if neither the options nor the config say how gains act, for unmerged LoRA weights
    and bidirectional models, and for tensors that are missing, unknown or of another shape.
    """
    lora = next((key for key in named.arrays if key.startswith("finetune_modules.")), None)
    if lora is not None:
        raise UserError(f"{named.source}: {lora} is a LoRA weight that is not merged, which is unsupported")
    if named.config.get("causal") is False:
        raise UserError(f"{named.source}: the config says causal=false; only causal models are supported")
    layers = count_layers(named, "layers.{i}.fn.fused_attn_ff_proj.weight")
    base = named.number("rotary_xpos_scale_base", XPOS_SCALE_BASE)
    xpos = None if named.config.get("xpos") is False else base
    offset = _gain_offset(named, options)
    hparams = palm_hparams(named, layers, "layers.0.fn.", "ff_out.2.weight", "token_emb.weight", xpos, offset)
    if "layers.0.fn.q_scale" in named.arrays:
        hparams = dataclasses.replace(hparams, qk_norm=Norm.RMS, qk_norm_eps=_QK_NORM_EPS / hparams.qkv)
    tied = is_tied(named, "token_emb.weight", "to_logits.weight")
    hparams = dataclasses.replace(hparams, tied=tied)
    return apply_table(key_table(hparams), named, hparams)


def _gain_offset(named: NamedArrays, options: ReaderOptions) -> int:
    """0 or 1, from the options, else from the config."""
    offset = named.config.get("gamma_offset") if options.gamma_offset is None else options.gamma_offset
    if offset is None:
        raise UserError(
            f"{named.source}: the file does not say whether norm gains are gamma (PaLM-rlhf-pytorch up to "
            "0.2.3, public 2023 checkpoints) or gamma + 1 (from 0.2.4); set gamma_offset to 0 or 1"
        )
    if offset not in (0, 1):
        raise UserError(f"{named.source}: gamma_offset is {offset!r}; allowed: 0, 1")
    return int(offset)


@dataclasses.dataclass(frozen=True, eq=False)
class _LengthGain:
    """Turn a scale of length-normalised heads, one for each width, into an RMS gain for each head."""

    dim: str

    def __call__(self, scale: ArrayLike, hparams: HParams) -> ArrayLike:
        row = np.asarray(scale[...]).astype(np.float32) / np.float32(math.sqrt(hparams.qkv))
        return np.broadcast_to(row, (getattr(hparams, self.dim), hparams.qkv))
