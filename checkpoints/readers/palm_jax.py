"""PaLM-jax: an Equinox model saved as the list of its leaves, which have no names.

Leaves stand in the order of the model's fields: the embedding, the final norm's gain, and for each layer the
norm's gain, `wi`, `attn_wo` and `ff_wo`. `wi` is input-major, with columns q | k | v | ff value | ff gate.
Rotary is interleaved; what else the block computes is what `palm_common` says.

Shapes alone do not tell it from its sibling `palm_lite` (ALiBi, keys and values shared): what is k and v of
width w there would be one of width 2w. So the head width is asked for (`ReaderOptions.dim_head`).

Worked example: leaves [256, 48], [48], then three times [48], [48, 480], [64, 48], [192, 48]: 480 − 64 −
2·192 = 32 columns are k and v of width 16, so 64 / 16 = 4 heads; in `palm_lite` they would be 2 heads of 32.
"""

import re

from checkpoints.key_table import KeyTable, Part, Rule, apply_table
from checkpoints.lazy import ArrayLike, transposed
from checkpoints.named_arrays import NamedArrays
from checkpoints.readers.options import ReaderOptions
from checkpoints.readers.palm_common import FUSED_PARTS
from checkpoints.state import CheckpointState
from layers.errors import UserError
from layers.hparams import Activation, HParams, Norm, Rope, RopePairing

_ENDS = ("embedding", "norm.gamma")
_LAYER = ("norm.gamma", "wi", "attn_wo", "ff_wo")
_TABLE = KeyTable(
    rules=(
        Rule("embedding", (Part("embedding", "vocab"),), "embed"),
        Rule("norm.gamma", (Part("final_norm_gain", "embed"),)),
        Rule("layers.{i}.norm.gamma", (Part("norm_gain", "embed"),)),
        Rule("layers.{i}.wi", FUSED_PARTS, "embed"),
        Rule("layers.{i}.attn_wo", (Part("o", "heads qkv"),), "embed"),
        Rule("layers.{i}.ff_wo", (Part("w2", "ff"),), "embed"),
    )
)


def matches(named: NamedArrays) -> bool:
    """Whether the tensors are numbered leaves."""
    return bool(named.arrays) and all(re.fullmatch("[0-9]+", name) for name in named.arrays)


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of PaLM-jax's leaves, as lazy views.

    Raises UserError for leaves that are no PaLM's, for `palm_lite`, where the width of a head is not said,
    and for options that do not apply.
    """
    if options.gamma_offset not in (None, 0):
        raise UserError(f"{named.source}: PaLM-jax has plain norm gains; gamma_offset can only be 0")
    leaves = _named_leaves(named)
    vocab, embed = leaves.matrix_shape("embedding")
    _, columns = leaves.matrix_shape("layers.0.wi")
    attention, _ = leaves.matrix_shape("layers.0.attn_wo")
    ff, _ = leaves.matrix_shape("layers.0.ff_wo")
    qkv = _head_width(named.source, columns - attention - 2 * ff, attention, options)
    hparams = HParams(
        layers=(len(leaves.arrays) - len(_ENDS)) // len(_LAYER), embed=embed, ff=ff, heads=attention // qkv,
        kv_heads=1, qkv=qkv, vocab=vocab, norm=Norm.LAYER, norm_eps=1e-5,
        rope=Rope(RopePairing.INTERLEAVED, 10000.0), act=Activation.SWISH_GATED, logit_scale=1.0, tied=True,
    )  # fmt: skip
    # The table's rules are output-major.
    turned = {
        name: transposed(array, (1, 0)) if name.endswith(".wi") and len(array.shape) == 2 else array
        for name, array in leaves.arrays.items()
    }
    return apply_table(_TABLE, NamedArrays(named.source, turned, {}), hparams)


def _named_leaves(named: NamedArrays) -> NamedArrays:
    """The leaves under the names of the fields that they were."""
    ordered: list[ArrayLike] = [named.arrays[name] for name in sorted(named.arrays, key=int)]
    layers, rest = divmod(len(ordered) - len(_ENDS), len(_LAYER))
    if layers < 1 or rest:
        raise UserError(
            f"{named.source}: {len(ordered)} leaves; PaLM-jax has {len(_ENDS)} and {len(_LAYER)} more a layer"
        )
    fields = _ENDS + tuple(f"layers.{i}.{name}" for i in range(layers) for name in _LAYER)
    return NamedArrays(named.source, dict(zip(fields, ordered, strict=True)), {})


def _head_width(source: str, rest: int, attention: int, options: ReaderOptions) -> int:
    """The width of a head, which has to be what `rest` columns of k and v say."""
    qkv = rest // 2
    if rest < 2 or rest % 2 or attention % qkv:
        raise UserError(
            f"{source}: {rest} columns of wi are left for k and v beside {attention} of q; these are no "
            "leaves of PaLM-jax's PaLM (its palm_lite is unsupported)"
        )
    if options.dim_head == rest:
        raise UserError(f"{source}: with dim_head {rest} this is PaLM-jax's palm_lite (ALiBi), unsupported")
    if options.dim_head is None:
        raise UserError(
            f"{source}: leaves do not say whether they are PaLM-jax's PaLM, with heads of {qkv}, or its "
            f"palm_lite, with heads of {rest}, which is unsupported; set dim_head to {qkv} if it is PaLM"
        )
    if options.dim_head != qkv:
        raise UserError(f"{source}: dim_head is {options.dim_head}; allowed: {qkv}, as the shapes say")
    return qkv
