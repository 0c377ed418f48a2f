"""PaLM in T5X's tree: three fused kernels for all layers together, bf16 or int8.

    decoder/decoder/q_wi_fused/kernel   [embed, layers, heads, qkv + 2·ff/heads]  q | W0 | W1 of each head
    decoder/decoder/kv_fused/kernel     [embed, layers, 1, 2·qkv]                 k | v
    decoder/decoder/o_wo_fused/kernel   [heads, layers, qkv + ff/heads, embed]    attention | ff of each head
    decoder/decoder/layer_norm/scale    [embed, layers]                           acts as 1 + scale
    decoder/token_embedder/embedding    [vocab, embed]

int8 trees have `qkernel` and `qscale` (the kernel's shape with 1 for the dims that are summed over) instead
of `kernel`. There is no final gain unless `decoder/decoder_norm/scale` is there. The tree does not say its
form: it is PaLM's, save what `form.json` changes ({"norm": "layer", "norm_eps": 1e-5, "logit_scale": 1.0}).

Worked example: q_wi_fused [48, 3, 4, 112] and kv_fused [48, 3, 1, 32] say qkv 16, 4 heads and an ff of
4·(112 − 16)/2 = 192.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from checkpoints.lazy import ArrayLike, Box, LazyArray, merged, sliced, transposed
from checkpoints.named_arrays import NamedArrays, closest
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState, Entry, QuantizedTensor, validate_state
from layers.errors import UserError
from layers.hparams import HParams, Norm, Rope

_ROOT = "decoder/decoder/"
_EMBEDDING, _FINAL = "decoder/token_embedder/embedding", "decoder/decoder_norm/scale"
_GAIN = f"{_ROOT}layer_norm/scale"
_FUSED = ("q_wi_fused", "kv_fused", "o_wo_fused")
_SUMMED = {"q_wi_fused": (0,), "kv_fused": (0,), "o_wo_fused": (0, 2)}
_NORMS = {"rms": Norm.RMS, "layer": Norm.LAYER}
_FORM = ("norm", "norm_eps", "norm_gain_offset", "logit_scale", "rope_theta")


def read(named: NamedArrays, options: ReaderOptions) -> CheckpointState:
    """The neutral state of a T5X PaLM, as lazy views.

    Raises UserError for another model's tree, for arrays that are missing, unknown or of shapes that do not
    agree, and for a form that is unknown.
    """
    quantized = f"{_ROOT}q_wi_fused/qkernel" in named.arrays
    hparams = _hparams(named, options, quantized)
    ends = ("qkernel", "qscale") if quantized else ("kernel",)
    known = {_EMBEDDING, _GAIN, _FINAL, *(f"{_ROOT}{name}/{end}" for name in _FUSED for end in ends)}
    unknown = [key for key in named.arrays if key not in known]
    if unknown:
        raise UserError(
            f"{named.source}: unexpected {unknown[0][:80]}{closest(unknown[0], dict.fromkeys(known))}"
        )
    _check_shapes(named, hparams, quantized)
    weights: dict[str, Entry] = {"embedding": named.arrays[_EMBEDDING]}
    plain = np.full(hparams.embed, 1 - hparams.norm_gain_offset, np.float32)
    weights["final_norm_gain"] = named.arrays.get(_FINAL, plain)
    gains = transposed(named.arrays[_GAIN], (1, 0))
    for layer in range(hparams.layers):
        weights[f"layer_{layer}/norm_gain"] = merged(sliced(gains, 0, layer, layer + 1), 0)
        for name, cut in _PARTS.items():
            weights[f"layer_{layer}/{name}"] = _entry(named, cut, layer, hparams, quantized)
    state = CheckpointState(hparams, weights)
    validate_state(state, named.source)
    return state


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Where one neutral kernel is in a fused one.

    Attributes:
      fused: the fused kernel.
      axis: the dim, without layers, that holds it beside others.
      span: from where to where.
      merge: the dim to merge with the next one, if any.
    """

    fused: str
    axis: int
    span: Callable[[HParams], tuple[int, int]]
    merge: int | None = None

    def of(self, array: ArrayLike, hparams: HParams) -> ArrayLike:
        """The kernel of one layer, from the fused one of that layer."""
        part = sliced(array, self.axis, *self.span(hparams))
        return part if self.merge is None else merged(part, self.merge)


def _ff(hparams: HParams) -> int:
    return hparams.ff // hparams.heads


_PARTS: Mapping[str, _Cut] = {
    "q": _Cut("q_wi_fused", 2, lambda h: (0, h.qkv)),
    "w0": _Cut("q_wi_fused", 2, lambda h: (h.qkv, h.qkv + _ff(h)), merge=1),
    "w1": _Cut("q_wi_fused", 2, lambda h: (h.qkv + _ff(h), h.qkv + 2 * _ff(h)), merge=1),
    "k": _Cut("kv_fused", 2, lambda h: (0, h.qkv)),
    "v": _Cut("kv_fused", 2, lambda h: (h.qkv, 2 * h.qkv)),
    "o": _Cut("o_wo_fused", 1, lambda h: (0, h.qkv)),
    "w2": _Cut("o_wo_fused", 1, lambda h: (h.qkv, h.qkv + _ff(h)), merge=0),
}


def _layer(array: ArrayLike, layer: int) -> ArrayLike:
    """One layer of an array whose dim 1 is layers."""
    return merged(sliced(array, 1, layer, layer + 1), 0)


def _entry(named: NamedArrays, cut: _Cut, layer: int, hparams: HParams, quantized: bool) -> Entry:
    """One kernel of one layer, float or int8."""
    if not quantized:
        return cut.of(_layer(named.arrays[f"{_ROOT}{cut.fused}/kernel"], layer), hparams)
    value = cut.of(_layer(named.arrays[f"{_ROOT}{cut.fused}/qkernel"], layer), hparams)
    scale = _layer(named.arrays[f"{_ROOT}{cut.fused}/qscale"], layer)
    output = cut.fused == "o_wo_fused"  # one scale for the whole kernel: [1, 1, embed]
    own = merged(scale, 0) if output else cut.of(scale, hparams)  # [1, output dims]
    return QuantizedTensor(value, _float32(merged(own, 0)))


def _float32(array: ArrayLike) -> LazyArray:
    def fetch(box: Box) -> np.ndarray:
        return np.asarray(array[box]).astype(np.float32)

    return LazyArray(tuple(array.shape), np.dtype(np.float32), fetch)


def _hparams(named: NamedArrays, options: ReaderOptions, quantized: bool) -> HParams:
    """The form, from the shapes and `form.json`."""
    end = "qkernel" if quantized else "kernel"
    shapes = {name: named.shape(f"{_ROOT}{name}/{end}") for name in _FUSED}
    bad = next((name for name, shape in shapes.items() if len(shape) != 4 or min(shape) < 1), None)
    if bad is not None:
        raise UserError(
            f"{named.source}: {_ROOT}{bad}/{end} has shape {list(shapes[bad])}, expected four dims"
        )
    embed, layers, heads, width = shapes["q_wi_fused"]
    qkv, ff = shapes["kv_fused"][3] // 2, (width - shapes["kv_fused"][3] // 2) // 2 * heads
    unknown = next((key for key in named.config if key not in _FORM), None)
    if unknown is not None:
        raise UserError(f"{named.source}: form.json has {unknown[:60]!r}; known: {', '.join(_FORM)}")
    norm = named.config.get("norm", "rms")
    if norm not in _NORMS:
        raise UserError(f"{named.source}: form.json says norm={norm!r:.40}; allowed: {', '.join(_NORMS)}")
    offset = named.config.get("norm_gain_offset", 1) if options.gamma_offset is None else options.gamma_offset
    scale = None if named.config.get("logit_scale") is None else named.number("logit_scale", 1.0)
    try:
        return HParams(
            layers=layers, embed=embed, ff=ff, heads=heads, kv_heads=1, qkv=qkv,
            vocab=named.matrix_shape(_EMBEDDING)[0], norm=_NORMS[norm], norm_gain_offset=offset,
            norm_eps=named.number("norm_eps", 1e-6), rope=Rope(theta=named.number("rope_theta", 10000.0)),
            logit_scale=scale,
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{named.source}: the tree is impossible: {error}") from None


def _check_shapes(named: NamedArrays, hparams: HParams, quantized: bool) -> None:
    """Refuse arrays whose shapes do not agree with each other."""
    h = hparams
    shapes: dict[str, tuple[int, ...]] = {
        "q_wi_fused": (h.embed, h.layers, h.heads, h.qkv + 2 * _ff(h)),
        "kv_fused": (h.embed, h.layers, 1, 2 * h.qkv),
        "o_wo_fused": (h.heads, h.layers, h.qkv + _ff(h), h.embed),
    }
    expected: dict[str, tuple[int, ...]] = {_GAIN: (h.embed, h.layers), _EMBEDDING: (h.vocab, h.embed)}
    for name, shape in shapes.items():
        expected[f"{_ROOT}{name}/{'qkernel' if quantized else 'kernel'}"] = shape
        if quantized:
            one = tuple(1 if axis in _SUMMED[name] else size for axis, size in enumerate(shape))
            expected[f"{_ROOT}{name}/qscale"] = one
    for key, shape in expected.items():
        if named.shape(key) != shape:
            raise UserError(
                f"{named.source}: {key} has shape {list(named.shape(key))}, expected {list(shape)}"
            )
