"""Llama-family models in GGUF (`general.architecture` "llama": Llama, Mistral, SmolLM and their like).

The rows of q and k are stored for interleaved rotary, so that is what the form says and no row is moved.
Llama 3's stretched frequencies come as a tensor of divisors, `rope_freqs.weight`, which is recognised as the
`llama3` scaling that makes it, or refused.

Data flow: metadata → `ConfigFields` (strict: what is not understood is refused) → `HParams` → key table.

Worked example: SmolLM2-135M has 30 blocks, 9 heads and 3 kv heads of 64, and no `output.weight`: tied.
"""

import dataclasses

import numpy as np

from checkpoints.key_table import apply_table
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.huggingface.common import SERIAL
from checkpoints.readers.huggingface.config_fields import ConfigFields
from checkpoints.readers.huggingface.decoder_table import DecoderNames, decoder_table
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import Bias, HParams, Rope, RopePairing, RopeScaling

ARCHITECTURE = "llama"
_DIVISORS = "rope_freqs.weight"
_NAMES = DecoderNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{i}.",
    matrices={
        "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
        "w0": "ffn_gate", "w1": "ffn_up", "w2": "ffn_down",
    },
    norms={"norm": "attn_norm", "norm2": "ffn_norm"},
    ignored=(),
)  # fmt: skip
_BIASES = {Bias.Q: "attn_q", Bias.K: "attn_k", Bias.V: "attn_v", Bias.O: "attn_output"}
_NEUTRAL = ("vocab_size",)
# Llama 3.1 and 3.2: the model cards' values; the divisors' maximum is the factor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of a GGUF model, as lazy views.

    Raises UserError for another architecture, for metadata that is missing or not understood, for tensors
    that are missing, unknown or of another shape, and for options that do not apply.
    """
    architecture = named.config.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(
            f"{named.source}: GGUF architecture {str(architecture)[:60]!r} is not supported; "
            f"supported: {ARCHITECTURE}"
        )
    if options.gamma_offset not in (None, 0):
        raise UserError(f"{named.source}: Llama has plain norm gains; gamma_offset can only be 0")
    if named.config.get("split.count", 1) not in (0, 1):
        raise UserError(f"{named.source}: one of {named.config['split.count']} parts; expected one file")
    try:
        hparams = _hparams(named)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{named.source}: the metadata is impossible: {error}") from None
    table = decoder_table(_NAMES, hparams)
    return apply_table(dataclasses.replace(table, ignored=(*table.ignored, _DIVISORS)), named, hparams)


def _hparams(named: NamedArrays) -> HParams:
    prefix = f"{ARCHITECTURE}."
    own = {key.removeprefix(prefix): value for key, value in named.config.items() if key.startswith(prefix)}
    fields = ConfigFields(named.source, "Llama in GGUF", own)
    for name in _NEUTRAL:
        fields.get(name)
    fields.only("expert_count", 0)
    fields.only("use_parallel_residual", False)
    layers = fields.layers("block_count")
    embed, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    qkv = fields.size("attention.key_length", max(1, embed // heads))
    fields.only("attention.value_length", qkv)
    window = fields.optional_size("attention.sliding_window")
    if fields.get("attention.layer_norm_rms_epsilon") is None:
        raise UserError(f"{named.source}: no {prefix}attention.layer_norm_rms_epsilon in the metadata")
    hparams = HParams(
        layers=layers, embed=embed, ff=fields.size("feed_forward_length"), heads=heads,
        kv_heads=fields.size("attention.head_count_kv", heads), qkv=qkv,
        vocab=named.matrix_shape("token_embd.weight")[0],
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0),
        rope=_rope(named, fields, qkv), windows=() if window is None else (window,) * layers,
        logit_scale=1.0, tied="output.weight" not in named.arrays,
        biases=frozenset(b for b, name in _BIASES.items() if f"blk.0.{name}.bias" in named.arrays),
        max_positions=fields.optional_size("context_length"), **SERIAL,
    )  # fmt: skip
    fields.finish()
    return hparams


def _rope(named: NamedArrays, fields: ConfigFields, qkv: int) -> Rope:
    """The rotary embedding. Raises UserError for a scaling that is not supported."""
    theta, dims = fields.number("rope.freq_base", 10000.0), fields.size("rope.dimension_count", qkv)
    kinds = {"none": None, "linear": "linear"}
    kind = fields.choice("rope.scaling.type", kinds, "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    fields.get("rope.scaling.original_context_length")
    fields.only("rope.scaling.finetuned", False)
    if kind is None and factor != 1 and fields.get("rope.scale_linear") is None:
        raise fields.refusal("rope.scaling.factor", "but no rope.scaling.type")
    scaling = RopeScaling("linear", factor) if factor != 1 else None
    rope = Rope(RopePairing.INTERLEAVED, theta, None if dims == qkv else dims, scaling=scaling)
    if _DIVISORS not in named.arrays:
        return rope
    if scaling is not None:
        raise UserError(f"{named.source}: {_DIVISORS} beside a linear rope scaling, which is not supported")
    return dataclasses.replace(rope, scaling=_llama3(named, theta, dims))


def _llama3(named: NamedArrays, theta: float, dims: int) -> RopeScaling | None:
    """The llama3 scaling that makes the stored divisors of frequencies; None where all are one."""
    if named.shape(_DIVISORS) != (dims // 2,):
        raise UserError(
            f"{named.source}: {_DIVISORS} has shape {list(named.shape(_DIVISORS))}, expected [{dims // 2}]"
        )
    divisors = np.asarray(named.arrays[_DIVISORS][...], np.float64)
    factor = float(np.round(divisors.max(), 3))
    if np.all(divisors == 1):
        return None
    scaling = RopeScaling("llama3", factor, **_LLAMA3) if factor > 0 else None
    if scaling is None or not np.allclose(divisors, _divisors(scaling, theta, dims), rtol=1e-3):
        raise UserError(
            f"{named.source}: {_DIVISORS} is no llama3 scaling with factors 1 and 4 of 8192 positions; "
            "other stretched frequencies are not supported"
        )
    return scaling


def _divisors(scaling: RopeScaling, theta: float, dims: int) -> np.ndarray:
    """What a llama3 scaling divides each pair's frequency by, [dims / 2]."""
    turns = scaling.original_positions * theta ** (-np.arange(0, dims, 2) / dims) / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return 1 / (keep + (1 - keep) / scaling.factor)
