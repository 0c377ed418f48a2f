"""Symmetric int8 kernels with one scale for each output channel, on the host and lazily.

A kernel w becomes `qvalue = round(w / scale)` in −127 … 127 with `scale = max|w| / 127` over the dims
that the matmul sums over, so `y = (x · qvalue) · scale` needs one multiplication after the reduction.
Kernels are quantized unfolded: a norm gain in the rows would widen the range of every column.

In models whose attention and feed-forward outputs are one matmul (`HParams.fused`) the kernels o and
w2 share their scale, which is therefore the maximum over both.

Data flow: float state → `quantize_state` → int8 state. Values are computed when a rectangle is read;
a scale is computed once, in blocks of rows, when it is first needed.

Worked example: a column (0.2, −1.27, 0.633) has scale 0.01 and becomes (20, −127, 63): errors stay
below half a scale. A column of zeros gets scale 1.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping

import numpy as np

from checkpoints.lazy import ArrayLike, Box, LazyArray
from checkpoints.state import CheckpointState, Entry, QuantizedTensor, state_tensors
from layers.errors import UserError

QMAX = 127
_BLOCK_ELEMENTS = 1 << 24


@dataclasses.dataclass(eq=False)
class _Scale:
    """The scale shared by some kernels of equal output dims, computed at first use."""

    kernels: dict[str, ArrayLike]
    contracted: dict[str, int]
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @functools.cached_property
    def value(self) -> np.ndarray:
        """[output dims] float32."""
        amax = functools.reduce(np.maximum, (self._amax(key) for key in self.kernels))
        return np.where(amax == 0, np.float32(1), amax / np.float32(QMAX)).astype(np.float32)

    def get(self) -> np.ndarray:
        """The scale; readers on several threads compute it once."""
        with self.lock:
            return self.value

    def array(self, shape: tuple[int, ...]) -> LazyArray:
        """The scale as an array that is computed when read."""
        return LazyArray(shape, np.dtype(np.float32), lambda box: self.get()[box])

    def _amax(self, key: str) -> np.ndarray:
        """max|w| over the summed dims, [output dims] float32."""
        kernel, axes = self.kernels[key], tuple(range(self.contracted[key]))
        rows = max(1, _BLOCK_ELEMENTS * kernel.shape[0] // int(np.prod(kernel.shape)))
        amax = np.zeros(tuple(kernel.shape)[len(axes) :], np.float32)
        for start in range(0, kernel.shape[0], rows):
            block = np.asarray(kernel[start : start + rows]).astype(np.float32)
            amax = np.maximum(amax, np.max(np.abs(block), axis=axes))  # NaN propagates
        if not np.all(np.isfinite(amax)):
            raise UserError(f"{key} has values that are not finite; int8 needs finite weights")
        return amax


@dataclasses.dataclass(frozen=True, eq=False)
class _Quantize:
    """Read a rectangle of a kernel as int8."""

    key: str
    scale: _Scale

    def __call__(self, box: Box) -> np.ndarray:
        contracted = self.scale.contracted[self.key]
        weight = np.asarray(self.scale.kernels[self.key][box]).astype(np.float32)
        steps = np.expand_dims(self.scale.get()[box[contracted:]], tuple(range(contracted)))
        return np.clip(np.rint(weight / steps), -QMAX, QMAX).astype(np.int8)


@dataclasses.dataclass(frozen=True, eq=False)
class _Dequantize:
    """Read a rectangle of an int8 kernel as float32."""

    entry: QuantizedTensor

    def __call__(self, box: Box) -> np.ndarray:
        contracted = len(self.entry.shape) - len(self.entry.scale.shape)
        steps = np.expand_dims(np.asarray(self.entry.scale[box[contracted:]]), tuple(range(contracted)))
        return np.asarray(self.entry.qvalue[box]).astype(np.float32) * steps


def _groups(state: CheckpointState) -> list[list[str]]:
    """The kernels, in the groups that share a scale."""
    kernels = [key for key, spec in state_tensors(state.hparams).items() if spec.contracted]
    if not state.hparams.fused:
        return [[key] for key in kernels]
    shared = [[f"layer_{i}/o", f"layer_{i}/w2"] for i in range(state.hparams.layers)]
    return [[key] for key in kernels if key.rpartition("/")[2] not in ("o", "w2")] + shared


def quantize_state(state: CheckpointState) -> CheckpointState:
    """The same model with int8 kernels; embedding, lm_head, norms and biases are left alone.

    An int8 state is returned as it is. Raises UserError, when a kernel is read, if it holds a value
    that is not finite.
    """
    if state.quantized:
        return state
    tensors = state_tensors(state.hparams)
    weights: dict[str, Entry] = dict(state.weights)
    for keys in _groups(state):
        kernels = {key: dequantize(state.weights[key]) for key in keys}
        scale = _Scale(kernels, {key: tensors[key].contracted for key in keys})
        shape = tensors[keys[0]].shape(state.hparams)[tensors[keys[0]].contracted :]
        scale_array = scale.array(shape)
        for key in keys:
            value = LazyArray(tuple(kernels[key].shape), np.dtype(np.int8), _Quantize(key, scale))
            weights[key] = QuantizedTensor(value, scale_array)
    return CheckpointState(state.hparams, weights)


def dequantize(entry: Entry) -> ArrayLike:
    """A float32 view of an int8 kernel; a float entry is returned as it is."""
    if not isinstance(entry, QuantizedTensor):
        return entry
    return LazyArray(entry.shape, np.dtype(np.float32), _Dequantize(entry))


def shared_output_scale(weights: Mapping[str, Entry], layer: int) -> ArrayLike:
    """The one scale of a fused layer's o and w2, [embed] float32.

    Raises UserError if their scales differ: one matmul cannot serve both.
    """
    attention, mlp = weights[f"layer_{layer}/o"], weights[f"layer_{layer}/w2"]
    if not isinstance(attention, QuantizedTensor) or not isinstance(mlp, QuantizedTensor):
        raise UserError(f"layer_{layer}/o and layer_{layer}/w2 are not both int8")
    same = attention.scale is mlp.scale or np.array_equal(attention.scale[...], mlp.scale[...])
    if not same:
        raise UserError(
            f"layer_{layer}/o and layer_{layer}/w2 have different int8 scales; a parallel block needs one"
        )
    return attention.scale
