"""The one entry point from an opened checkpoint to `Params` on a device.

Layers are read, moved and preprocessed one after another, so that beyond the result the host and the device
hold one layer at a time; the program that folds and fuses a layer is compiled once and its inputs are
donated.

Data flow: `CheckpointState` (lazy) → one layer's leaves on the device → `preprocess_layer` → `Params`.

Worked example: PaLM 8B in bfloat16 ends as 17.3 GB; while loading, one float32 layer more (1.0 GB) is alive.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.int8 import quantize_state
from checkpoints.preprocess import layer_leaves, preprocess_ends, preprocess_layer
from checkpoints.state import CheckpointState, Entry, QuantizedTensor
from layers.errors import UserError
from layers.hparams import HParams
from layers.params import LayerParams, Params


class WeightsDtype(enum.Enum):
    """How kernels are held; embedding, lm_head and norms stay float."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def float_dtype(self) -> jnp.dtype:
        """The dtype of float kernels, and of what int8 leaves float."""
        return jnp.dtype("bfloat16" if self is WeightsDtype.BFLOAT16 else "float32")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to hold a model.

    Attributes:
      weights: dtype of the kernels.
      stacked: layers in one stack with a loop over them, or one by one and unrolled.
    """

    weights: WeightsDtype = WeightsDtype.FLOAT32
    stacked: bool = True


Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


def _ignore(done: int, total: int) -> None:
    del done, total


def load_params(
    state: CheckpointState, options: LoadOptions = LoadOptions(), progress: Progress = _ignore
) -> Params:
    """Reads, folds and fuses a model onto the default device.

    Raises UserError for int8 kernels asked for in a float dtype: rounding cannot be undone.
    """
    hparams = state.hparams
    if state.quantized and options.weights is not WeightsDtype.INT8:
        raise UserError(
            f"weights={options.weights.value} asked of a checkpoint with int8 kernels; allowed: int8"
        )
    weights = quantize_state(state).weights if options.weights is WeightsDtype.INT8 else state.weights
    reader = _Reader(sum(map(_nbytes, weights.values())), progress)
    dtype = options.weights.float_dtype
    ends = reader.read({key: entry for key, entry in weights.items() if "/" not in key})
    arrays = _ends_program(hparams, dtype)(ends)
    prepare = _layer_program(hparams, dtype)
    layers = (prepare(*_split(reader.read(layer_leaves(weights, i)))) for i in range(hparams.layers))
    return Params(layers=_stack(hparams.layers, layers) if options.stacked else tuple(layers), **arrays)


def _nbytes(entry: Entry) -> int:
    if isinstance(entry, QuantizedTensor):
        return _nbytes(entry.qvalue) + _nbytes(entry.scale)
    return int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize


class _Reader:
    """Moves entries to the device and reports the bytes."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def read(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """The same entries as device arrays."""
        return {key: self._move(entry) for key, entry in entries.items()}

    def _move(self, entry: Entry) -> Entry:
        if isinstance(entry, QuantizedTensor):
            return QuantizedTensor(self._move(entry.qvalue), self._move(entry.scale))
        array = jax.device_put(np.asarray(entry[...]))
        self.done += _nbytes(entry)
        self.progress(self.done, self.total)
        return array


def _split(leaves: dict[str, Entry]) -> tuple[dict[str, jax.Array], dict[str, tuple[jax.Array, jax.Array]]]:
    """Float leaves, and int8 ones as (value, scale): pytrees for a jit boundary."""
    floats = {key: leaf for key, leaf in leaves.items() if not isinstance(leaf, QuantizedTensor)}
    pairs = {
        key: (leaf.qvalue, leaf.scale) for key, leaf in leaves.items() if isinstance(leaf, QuantizedTensor)
    }
    return floats, pairs


def _layer_program(hparams: HParams, dtype: jnp.dtype) -> Callable[..., LayerParams]:
    @jax.jit
    def program(floats: dict, pairs: dict) -> LayerParams:
        quantized = {key: QuantizedTensor(*pair) for key, pair in pairs.items()}
        return preprocess_layer(hparams, floats | quantized, dtype)

    return program


def _ends_program(hparams: HParams, dtype: jnp.dtype) -> Callable[..., dict]:
    return jax.jit(functools.partial(preprocess_ends, hparams, dtype=dtype))


def _stack(count: int, layers: Iterator[LayerParams]) -> LayerParams:
    """Layers one after another into one stack that is written in place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack: LayerParams, layer: LayerParams, index: jax.Array) -> LayerParams:
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0), stack, layer
        )

    stack = None
    for index, layer in enumerate(layers):
        if stack is None:
            stack = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), layer)
        stack = put(stack, layer, np.int32(index))
    return stack
