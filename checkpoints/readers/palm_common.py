"""What the two PyTorch reproductions of PaLM share: sizes from shapes, and the block's layout.

Both are parallel blocks with one shared mean-centred norm (a learned gain, and a `beta` that is a
buffer of zeros), one kv head, half-split rotary, and a fused projection with rows
q | k | v | ff value | ff gate, where the block computes `silu(gate) · value`. So gate is the neutral
form's w0 and value its w1. Logits are not scaled.

Worked example: fused rows 480, attention output [48, 64], ff output [48, 192] and eight rotary
frequencies say qkv = 16, heads = 64 / 16 = 4, ff = 192: 64 + 16 + 16 + 192 + 192 = 480.
"""

from checkpoints.key_table import Part, identical
from checkpoints.named_arrays import NamedArrays
from layers.errors import UserError
from layers.hparams import Activation, HParams, Norm, Rope, RopePairing

FUSED_PARTS = (
    Part("q", "heads qkv"),
    Part("k", "kv_heads qkv"),
    Part("v", "kv_heads qkv"),
    Part("w1", "ff"),
    Part("w0", "ff"),
)


def palm_hparams(
    named: NamedArrays,
    layers: int,
    block: str,
    ff_out: str,
    embedding: str,
    xpos_scale_base: float | None,
    norm_gain_offset: int,
) -> HParams:
    """The form of a PyTorch PaLM, from its first block's shapes.

    Args:
      named: the foreign tensors.
      layers: number of blocks.
      block: name prefix of the first block, with its last dot.
      ff_out: name of the feed-forward output in a block.
      embedding: name of the embedding.
      xpos_scale_base, norm_gain_offset: see `HParams` and `Rope`.

    Raises UserError for sizes that fit no such model; `palm_lite` is named as what it is.
    """
    vocab, embed = named.matrix_shape(embedding)
    fused, _ = named.matrix_shape(f"{block}fused_attn_ff_proj.weight")
    _, attention = named.matrix_shape(f"{block}attn_out.weight")
    _, ff = named.matrix_shape(f"{block}{ff_out}")
    qkv = _head_width(named, f"{block}rotary_emb.inv_freq")
    if attention % qkv:
        raise UserError(f"{named.source}: attention of width {attention} is not made of heads of {qkv}")
    expected = attention + 2 * qkv + 2 * ff
    if fused != expected:
        raise UserError(
            f"{named.source}: {block}fused_attn_ff_proj.weight has {fused} rows, expected {expected} "
            f"= {attention} (q) + 2·{qkv} (k, v) + 2·{ff} (ff)"
        )
    heads = attention // qkv
    named.check_config({"num_tokens": vocab, "dim": embed, "depth": layers, "dim_head": qkv, "heads": heads})
    return HParams(
        layers=layers, embed=embed, ff=ff, heads=heads, kv_heads=1, qkv=qkv, vocab=vocab,
        norm=Norm.LAYER, norm_eps=named.number("eps", 1e-5), norm_gain_offset=norm_gain_offset,
        rope=Rope(RopePairing.HALF, named.number("rope_theta", 10000.0), xpos_scale_base=xpos_scale_base),
        act=Activation.SWISH_GATED, logit_scale=1.0, tied=True,
    )  # fmt: skip


def is_tied(named: NamedArrays, embedding: str, output: str) -> bool:
    """Whether the output projection is absent or a copy of the embedding. Reads both."""
    return output not in named.arrays or identical(named.arrays[embedding], named.arrays[output])


def _head_width(named: NamedArrays, frequencies: str) -> int:
    """qkv: twice the number of rotary frequencies, or what the config says.

    Without either the fused projection has several readings, so this is an error.
    """
    if frequencies in named.arrays:
        shape = named.shape(frequencies)
        if len(shape) != 1 or shape[0] < 1:
            raise UserError(f"{named.source}: {frequencies} has shape {list(shape)}, expected a vector")
        return 2 * shape[0]
    if named.config.get("dim_head") is None:
        raise UserError(
            f"{named.source}: neither {frequencies} nor a dim_head in the config says how wide a head is; "
            "this may be palm_lite (ALiBi instead of rotary, keys and values shared), which is unsupported"
        )
    return named.integer("dim_head", 64)
