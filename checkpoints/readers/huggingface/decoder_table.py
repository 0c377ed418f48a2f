"""One key table for decoder models in Hugging Face form; families differ in names and fusion alone.

A layer has q, k and v as matrices of their own or fused, where the rows of each kv head's queries, key and
value stand together. Which biases, norms and gates there are follows from `HParams`.

Data flow: `DecoderNames`, `HParams` → `decoder_table` → `KeyTable`.

Worked example: Falcon-7B has 71 query heads of 64 and one kv head. `query_key_value.weight` is
[(71 + 1 + 1)·64, 4544]: one group of 71 query heads, a key and a value. GPT-NeoX with 12 heads has twelve
groups of one query head, a key and a value.
"""

import dataclasses
from collections.abc import Mapping

from checkpoints.key_table import KeyTable, Part, Rule
from checkpoints.lazy import ArrayLike, repeated
from checkpoints.state import LAYER_TENSORS, MODEL_TENSORS
from layers.hparams import HParams

_ROWS = {
    "q": "heads qkv", "k": "kv_heads qkv", "v": "kv_heads qkv", "o": "embed",
    "w0": "ff", "w1": "ff", "w2": "embed",
}  # fmt: skip
_INPUTS = {"o": "heads qkv", "w2": "ff"}
_FUSED_ROWS = {"q": "heads_per_kv qkv", "k": "qkv", "v": "qkv"}


@dataclasses.dataclass(frozen=True)
class DecoderNames:
    """What a family calls its tensors, without `.weight` and `.bias`.

    Attributes:
      embedding, final_norm, head: outside the layers.
      other_head: what some versions call the head.
      layer: prefix of a layer's tensors.
      matrices: neutral name → name in a layer, for every matrix that stands alone.
      fused_qkv: name in a layer of the fused q, k and v, if they are.
      norms: neutral name → name in a layer.
      shared_qk_gain: whether a qk-norm's gain is one head's, the same for all, and not one for each.
      ignored: names in a layer, with their endings, of constants that some versions store.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    other_head: str | None = None
    layer: str = "model.layers.{i}."
    matrices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused_qkv: str | None = None
    norms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared_qk_gain: bool = False
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)


def decoder_table(names: DecoderNames, hparams: HParams) -> KeyTable:
    """The layout of a model of this form in a family that uses these names."""
    present = {spec.name for spec in MODEL_TENSORS + LAYER_TENSORS if spec.present(hparams)}
    layer = names.layer
    rules = [
        Rule(f"{names.embedding}.weight", (Part("embedding", "vocab"),), "embed"),
        *_norm(names.final_norm, "final_norm", present),
        *_linear(names.head, ("lm_head",), ("vocab",), "embed", present),
        *(rule for ours, theirs in names.norms.items() for rule in _norm(layer + theirs, ours, present)),
        *_qk_gains(names, hparams),
    ]
    for ours, theirs in names.matrices.items():
        rules += _linear(layer + theirs, (ours,), (_ROWS[ours],), _INPUTS.get(ours, "embed"), present)
    if names.fused_qkv is not None:
        rows = tuple(_FUSED_ROWS.values())
        rules += _linear(layer + names.fused_qkv, tuple(_FUSED_ROWS), rows, "embed", present, "kv_heads")
    ignored = tuple(layer + name for name in names.ignored)
    return KeyTable(tuple(rules), ignored + ((f"{names.head}.weight",) if hparams.tied else ()))


def _linear(
    theirs: str,
    ours: tuple[str, ...],
    rows: tuple[str, ...],
    inputs: str,
    present: set[str],
    groups: str = "",
) -> list[Rule]:
    """A matrix and its bias, as far as the model has them."""
    rules = []
    if ours[0] in present:
        parts = tuple(Part(name, dims) for name, dims in zip(ours, rows, strict=True))
        rules.append(Rule(f"{theirs}.weight", parts, inputs, groups))
    if f"{ours[0]}_bias" in present:
        parts = tuple(Part(f"{name}_bias", dims) for name, dims in zip(ours, rows, strict=True))
        rules.append(Rule(f"{theirs}.bias", parts, "", groups))
    return rules


def _norm(theirs: str, ours: str, present: set[str]) -> list[Rule]:
    """A norm's gain and its bias, as far as the model has them."""
    pairs = (("weight", f"{ours}_gain"), ("bias", f"{ours}_bias"))
    return [Rule(f"{theirs}.{end}", (Part(name, "embed"),)) for end, name in pairs if name in present]


def _qk_gains(names: DecoderNames, hparams: HParams) -> list[Rule]:
    """The gains of qk-norm: one head's for all of them, or [heads, qkv]."""
    if hparams.qk_norm is None:
        return []
    rules = []
    for name, heads in (("q", "heads"), ("k", "kv_heads")):
        pattern = f"{names.layer}self_attn.{name}_norm.weight"
        if names.shared_qk_gain:
            rules.append(Rule(pattern, (Part(f"{name}_norm_gain", "qkv", _ForEach(heads)),)))
        else:
            rules.append(Rule(pattern, (Part(f"{name}_norm_gain", heads),), "qkv"))
    return rules


@dataclasses.dataclass(frozen=True)
class _ForEach:
    """One head's gain, for each of the heads."""

    heads: str

    def __call__(self, gain: ArrayLike, hparams: HParams) -> ArrayLike:
        return repeated(gain, getattr(hparams, self.heads))
