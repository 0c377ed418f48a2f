"""The one entry point from an opened checkpoint to `Params` on a device.

Layers are read, moved and preprocessed one after another, so that beyond the result the host and the device
hold one layer at a time; the program that folds and fuses a layer is compiled once and its inputs are
donated.

Data flow: `CheckpointState` (lazy) → one layer's leaves on the device → `preprocess_layer` → `Params`.

Worked example: PaLM 8B in bfloat16 ends as 17.3 GB; while loading, one float32 layer more (1.0 GB) is alive.
"""

import concurrent.futures
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints.heap import release_free_memory
from checkpoints.int8 import quantize_state, shared_output_scale
from checkpoints.preprocess import layer_leaves, preprocess_ends, preprocess_layer
from checkpoints.state import CheckpointState, Entry, QuantizedTensor
from checkpoints.storage import ChunkMajor, OneDevice, Storage
from layers.errors import UserError
from layers.hparams import HParams
from layers.layout import WeightStorage
from layers.mesh_shape import MeshShape
from layers.norm import NormParams
from layers.params import LayerParams, Params
from layers.partitioning import check_model, param_specs, shardings

WORKERS = 4
"""Threads that read the arrays of a layer."""


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
class MeshPlacement:
    """Where on a mesh, and in which order, weights are to be."""

    storage: WeightStorage
    shape: MeshShape
    mesh: Mesh


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to hold a model.

    Attributes:
      weights: dtype of the kernels.
      stacked: layers in one stack with a loop over them, or one by one and unrolled.
      placement: None for the default device.
    """

    weights: WeightsDtype = WeightsDtype.FLOAT32
    stacked: bool = True
    placement: MeshPlacement | None = None

    @property
    def storage(self) -> Storage:
        """The order of the matrices."""
        if self.placement is None:
            return OneDevice()
        return ChunkMajor(self.placement.storage, self.placement.shape)

    def shardings(self, params: Params) -> Any:
        """Where each leaf of `params` (arrays or shapes) is to be; None for the default device."""
        if self.placement is None:
            return None
        return shardings(self.placement.mesh, param_specs(params, self.placement.storage))


Pair = tuple[Any, Any]
"""An int8 kernel's values and scales."""
Loaded = dict[str, Any]
"""Key → array, or `QuantizedTensor` of arrays."""
Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""


def _ignore(done: int, total: int) -> None:
    del done, total


def load_params(
    state: CheckpointState, options: LoadOptions = LoadOptions(), progress: Progress = _ignore
) -> Params:
    """Reads, folds and fuses a model into its place.

    Raises UserError for int8 kernels asked for in a float dtype: rounding cannot be undone.
    """
    hparams = state.hparams
    if state.quantized and options.weights is not WeightsDtype.INT8:
        raise UserError(
            f"weights={options.weights.value} asked of a checkpoint with int8 kernels; allowed: int8"
        )
    if options.placement is not None:
        check_model(hparams, options.placement.shape)
    weights = quantize_state(state).weights if options.weights is WeightsDtype.INT8 else state.weights
    reader = _Reader(sum(map(_nbytes, weights.values())), progress)
    programs = _Programs(hparams, options)
    ends = programs.ends(reader.read({key: entry for key, entry in weights.items() if "/" not in key}))
    if options.weights is WeightsDtype.INT8 and hparams.fused:
        for index in range(hparams.layers):
            shared_output_scale(weights, index)  # one matmul serves both outputs
    layers = (programs.layer(reader.read(layer_leaves(weights, i))) for i in range(hparams.layers))
    return dataclasses.replace(ends, layers=programs.stack(layers) if options.stacked else tuple(layers))


class _Programs:
    """The compiled pieces of a load, each putting its result where it belongs."""

    def __init__(self, hparams: HParams, options: LoadOptions) -> None:
        self.hparams, self.options = hparams, options
        self._layer: Callable[..., LayerParams] | None = None

    def ends(self, leaves: Loaded) -> Params:
        """Everything but the layers, as `Params` without layers."""
        dtype, storage = self.options.weights.float_dtype, self.options.storage

        def program(leaves: Loaded) -> Params:
            return Params(layers=(), **preprocess_ends(self.hparams, leaves, dtype, storage))

        target = self.options.shardings(jax.eval_shape(program, leaves))
        return jax.jit(program, out_shardings=target)(leaves)

    def layer(self, leaves: Loaded) -> LayerParams:
        """One layer; its program is compiled once."""
        release_free_memory()
        floats, pairs = _split(leaves)
        if self._layer is None:
            target = self._layer_shardings(jax.eval_shape(self._preprocess, floats, pairs), stacked=False)
            self._layer = jax.jit(self._preprocess, out_shardings=target)
        return self._layer(floats, pairs)

    def _preprocess(self, floats: Loaded, pairs: dict[str, Pair]) -> LayerParams:
        quantized = {key: QuantizedTensor(*pair) for key, pair in pairs.items()}
        dtype, storage = self.options.weights.float_dtype, self.options.storage
        return preprocess_layer(self.hparams, floats | quantized, dtype, storage)

    def _layer_shardings(self, layer: LayerParams, *, stacked: bool) -> LayerParams | None:
        """Shardings of one layer, or of a stack of layers."""
        whole = Params(embedding=None, layers=layer if stacked else (layer,), final_norm=NormParams())
        target = self.options.shardings(whole)
        return None if target is None else target.layers if stacked else target.layers[0]

    def stack(self, layers: Iterator[LayerParams]) -> LayerParams:
        """Layers one after another into one stack that is written in place."""
        layer = next(layers)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.hparams.layers, *leaf.shape), leaf.dtype), layer
        )
        target = self._layer_shardings(shapes, stacked=True)

        def put(stack: LayerParams, layer: LayerParams, index: jax.Array) -> LayerParams:
            return jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0), stack, layer
            )

        def empty() -> LayerParams:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        place = jax.jit(put, donate_argnums=0, out_shardings=target)
        stack = jax.jit(empty, out_shardings=target)()
        # Each layer is awaited and let go before the next one is read: memory holds one at a time.
        stack = jax.block_until_ready(place(stack, layer, np.int32(0)))
        for index in range(1, self.hparams.layers):
            del layer
            layer = next(layers)
            stack = jax.block_until_ready(place(stack, layer, np.int32(index)))
        return stack


def _nbytes(entry: Entry) -> int:
    if isinstance(entry, QuantizedTensor):
        return _nbytes(entry.qvalue) + _nbytes(entry.scale)
    return int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize


class _Reader:
    """Reads entries, several at a time, and reports the bytes."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def read(self, entries: Mapping[str, Any]) -> Loaded:
        """The same entries as arrays."""
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as workers:
            arrays = workers.map(_read_entry, entries.values())
            loaded = {}
            for (key, entry), array in zip(entries.items(), arrays, strict=True):
                loaded[key] = array
                self.done += _nbytes(entry)
                self.progress(self.done, self.total)
        return loaded


def _read_entry(entry: Entry) -> Any:
    if isinstance(entry, QuantizedTensor):
        return QuantizedTensor(_read_entry(entry.qvalue), _read_entry(entry.scale))
    return np.asarray(entry[...])


def _split(leaves: Loaded) -> tuple[Loaded, dict[str, Pair]]:
    """Float leaves, and int8 ones as (value, scale): pytrees for a jit boundary."""
    floats = {key: leaf for key, leaf in leaves.items() if not isinstance(leaf, QuantizedTensor)}
    pairs = {
        key: (leaf.qvalue, leaf.scale) for key, leaf in leaves.items() if isinstance(leaf, QuantizedTensor)
    }
    return floats, pairs
