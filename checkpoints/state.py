"""The neutral form of a checkpoint: every weight under this project's name, unfused and unfolded.

Every reader produces a `CheckpointState` and everything after reads one, so that a model's origin
ends here. Keys are flat (`layer_3/w0`); weights are float arrays in the shapes of `state_spec`, or
lazy views with such shapes; no norm gain, softmax scale or head padding is folded in. A kernel may be
int8: then its entry is a `QuantizedTensor` under the same key.

Data flow: foreign arrays → reader → `CheckpointState` → `validate_state` → preprocess, or a save.

Worked example: one layer, embed 48, 4 heads of 16, one kv head, ff 192, tied, gated, RMS norm:

    embedding [256, 48]          layer_0/q [48, 4, 16]     layer_0/k, layer_0/v [48, 1, 16]
    final_norm_gain [48]         layer_0/o [4, 16, 48]     layer_0/w0, layer_0/w1 [48, 192]
    layer_0/norm_gain [48]       layer_0/w2 [192, 48]

In int8, `layer_0/q` has a scale of [4, 16]: one for each output channel.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.lazy import ArrayLike
from layers.errors import UserError
from layers.hparams import Bias, HParams, NormPlacement

FLOAT_DTYPES = (
    np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float64),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """An int8 kernel: the float one is `qvalue · scale`.

    Attributes:
      qvalue: int8, in the kernel's own shape.
      scale: float32, in the shape of the kernel's output dims (see `TensorSpec.output_dims`).
    """

    qvalue: ArrayLike
    scale: ArrayLike

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return tuple(self.qvalue.shape)


Entry = ArrayLike | QuantizedTensor


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """A model's form and all of its weights, in the neutral form.

    Attributes:
      hparams: shapes and choices.
      weights: flat key → float array-like, or `QuantizedTensor` for kernels of an int8 state.
    """

    hparams: HParams
    weights: Mapping[str, Entry]

    @property
    def quantized(self) -> bool:
        """Whether the kernels are int8."""
        return any(isinstance(entry, QuantizedTensor) for entry in self.weights.values())


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """What opening a path gives; no weight has been read.

    Attributes:
      source: the path, for messages.
      state: the model.
      tokenizer_file: the tokenizer stored beside the weights, if any.
      extra: what the saver wanted to keep with them (JSON).
      family: what people call this kind of checkpoint.
    """

    source: str
    state: CheckpointState
    tokenizer_file: Path | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    family: str = ""


def _always(hparams: HParams) -> bool:
    del hparams
    return True


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of the neutral form.

    Attributes:
      name: its key, without the `layer_{i}/` prefix.
      dims: names of its dims, outermost first.
      contracted: how many leading dims the matmul sums over; 0 for what is not a kernel.
      present: whether a model of this form has it.
    """

    name: str
    dims: tuple[str, ...]
    contracted: int = 0
    present: Callable[[HParams], bool] = _always

    @property
    def output_dims(self) -> tuple[str, ...]:
        """The dims that an int8 scale has."""
        return self.dims[self.contracted :]

    def shape(self, hparams: HParams) -> tuple[int, ...]:
        """Sizes of the dims."""
        return tuple(getattr(hparams, dim) for dim in self.dims)


def _has_bias(bias: Bias) -> Callable[[HParams], bool]:
    return lambda hparams: bias in hparams.biases


def _norm(name: str, placements: Iterable[NormPlacement]) -> tuple[TensorSpec, TensorSpec]:
    """The gain and the bias of one norm over embed."""
    allowed = frozenset(placements)
    return (
        TensorSpec(f"{name}_gain", ("embed",), present=lambda h: h.norm_placement in allowed),
        TensorSpec(f"{name}_bias", ("embed",), present=lambda h: h.norm_bias and h.norm_placement in allowed),
    )


_Q_DIMS, _KV_DIMS = ("heads", "qkv"), ("kv_heads", "qkv")
_TWO_OR_MORE = (NormPlacement.TWO, NormPlacement.PRE_AND_POST)

MODEL_TENSORS: tuple[TensorSpec, ...] = (
    TensorSpec("embedding", ("vocab", "embed")),
    TensorSpec("lm_head", ("embed", "vocab"), present=lambda h: not h.tied),
    TensorSpec("lm_head_bias", ("vocab",), present=_has_bias(Bias.LM_HEAD)),
    *_norm("final_norm", NormPlacement),
)

LAYER_TENSORS: tuple[TensorSpec, ...] = (
    TensorSpec("q", ("embed", *_Q_DIMS), contracted=1),
    TensorSpec("k", ("embed", *_KV_DIMS), contracted=1),
    TensorSpec("v", ("embed", *_KV_DIMS), contracted=1),
    TensorSpec("o", (*_Q_DIMS, "embed"), contracted=2),
    TensorSpec("w0", ("embed", "ff"), contracted=1),
    TensorSpec("w1", ("embed", "ff"), contracted=1, present=lambda h: h.act.gated),
    TensorSpec("w2", ("ff", "embed"), contracted=1),
    *_norm("norm", NormPlacement),
    *_norm("norm2", _TWO_OR_MORE),
    *_norm("post_norm", (NormPlacement.PRE_AND_POST,)),
    *_norm("post_norm2", (NormPlacement.PRE_AND_POST,)),
    TensorSpec("q_norm_gain", _Q_DIMS, present=lambda h: h.qk_norm is not None),
    TensorSpec("k_norm_gain", _KV_DIMS, present=lambda h: h.qk_norm is not None),
    TensorSpec("q_bias", _Q_DIMS, present=_has_bias(Bias.Q)),
    TensorSpec("k_bias", _KV_DIMS, present=_has_bias(Bias.K)),
    TensorSpec("v_bias", _KV_DIMS, present=_has_bias(Bias.V)),
    TensorSpec("o_bias", ("embed",), present=_has_bias(Bias.O)),
    TensorSpec("w0_bias", ("ff",), present=_has_bias(Bias.FF_IN)),
    TensorSpec("w1_bias", ("ff",), present=lambda h: h.act.gated and Bias.FF_IN in h.biases),
    TensorSpec("w2_bias", ("embed",), present=_has_bias(Bias.FF_OUT)),
)


def state_tensors(hparams: HParams) -> dict[str, TensorSpec]:
    """Every key of a model of this form, with its dims, in a fixed order."""
    tensors = {spec.name: spec for spec in MODEL_TENSORS if spec.present(hparams)}
    for layer in range(hparams.layers):
        tensors |= {f"layer_{layer}/{spec.name}": spec for spec in LAYER_TENSORS if spec.present(hparams)}
    return tensors


def state_spec(hparams: HParams) -> dict[str, tuple[int, ...]]:
    """Every key of a model of this form, with its shape, in a fixed order."""
    return {key: spec.shape(hparams) for key, spec in state_tensors(hparams).items()}


def validate_state(state: CheckpointState, source: str) -> None:
    """Check keys, shapes and dtypes against the model's form; no element is read.

    Args:
      state: what a reader produced.
      source: the file's name, for the message.

    Raises UserError naming the first key that is missing, unknown, or of another shape or dtype than
    expected, with expected and found.
    """
    tensors = state_tensors(state.hparams)
    missing = [key for key in tensors if key not in state.weights]
    if missing:
        expected = list(tensors[missing[0]].shape(state.hparams))
        raise UserError(f"{source}: missing {missing[0]} {expected}{_more(missing)}")
    unknown = [key for key in state.weights if key not in tensors]
    if unknown:
        found = list(state.weights[unknown[0]].shape)
        raise UserError(
            f"{source}: unexpected {unknown[0]} {found}{_more(unknown)}; this model has no such key"
        )
    for key, spec in tensors.items():
        _check_entry(state, key, spec, source)


def _more(keys: list[str]) -> str:
    """Say how many keys beyond the first there are."""
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""


def _check_entry(state: CheckpointState, key: str, spec: TensorSpec, source: str) -> None:
    """Check one entry's shape and dtype, and that all kernels are int8 or none is."""
    entry, shape = state.weights[key], spec.shape(state.hparams)
    if state.quantized and spec.contracted and not isinstance(entry, QuantizedTensor):
        raise UserError(
            f"{source}: {key} is {entry.dtype} beside int8 kernels; expected an int8 value and a scale"
        )
    if isinstance(entry, QuantizedTensor):
        if not spec.contracted:
            raise UserError(f"{source}: {key} is int8, expected a float dtype; only kernels are quantized")
        scale_shape = shape[spec.contracted :]
        _check_array(f"{source}: {key} (int8 value)", entry.qvalue, shape, (np.dtype(np.int8),))
        _check_array(f"{source}: {key} (scale)", entry.scale, scale_shape, (np.dtype(np.float32),))
        return
    _check_array(f"{source}: {key}", entry, shape, FLOAT_DTYPES)


def _check_array(name: str, array: ArrayLike, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...]) -> None:
    """Check one array's shape and dtype."""
    if tuple(array.shape) != shape:
        raise UserError(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
    if np.dtype(array.dtype) not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise UserError(f"{name} has dtype {array.dtype}, expected {allowed}")
