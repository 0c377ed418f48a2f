"""The one entry point from an opened checkpoint to `Params` on a device.

The program that folds and fuses a layer, and writes it into the stack in place, is compiled before anything
is read. So it is known which part of each leaf a chip needs: a leaf is read by one of a few workers, its
shards are put where they are wanted, and it is let go. Layers follow each other; beyond the result, what is
alive is a few leaves as read, one layer's shards, and the program's own memory, about one more layer.

Data flow: `CheckpointState` (lazy) → leaf → its shards → `preprocess_layer`, into the stack → `Params`.

Worked example: PaLM 8B in bfloat16 ends as 17.3 GB; while loading, a float32 layer (1.0 GB) is alive twice.
"""

import concurrent.futures
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints.heap import large_blocks_returned
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


Leaves = dict[str, Any]
"""Key → array, or (value, scale) of an int8 kernel."""
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
    programs = _Programs(hparams, options, reader)
    with large_blocks_returned():
        ends = programs.ends({key: entry for key, entry in weights.items() if "/" not in key})
        if options.weights is WeightsDtype.INT8 and hparams.fused:
            for index in range(hparams.layers):
                shared_output_scale(weights, index)  # one matmul serves both outputs
        layers = (layer_leaves(weights, index) for index in range(hparams.layers))
        held = programs.stack(layers) if options.stacked else tuple(map(programs.layer, layers))
    return dataclasses.replace(ends, layers=held)


class _Programs:
    """The compiled pieces of a load, each putting its result where it belongs."""

    def __init__(self, hparams: HParams, options: LoadOptions, reader: "_Reader") -> None:
        self.hparams, self.options, self.reader = hparams, options, reader
        self._compiled: dict[Any, Any] = {}

    def ends(self, entries: Mapping[str, Entry]) -> Params:
        """Everything but the layers, as `Params` without layers."""
        dtype, storage = self.options.weights.float_dtype, self.options.storage

        def program(leaves: Leaves) -> Params:
            return Params(layers=(), **preprocess_ends(self.hparams, leaves, dtype, storage))

        target = self.options.shardings(jax.eval_shape(program, _shapes(entries)))
        return self._run(program, entries, target)

    def layer(self, entries: Mapping[str, Entry]) -> LayerParams:
        """One layer."""
        target = self._layer_shardings(jax.eval_shape(self._preprocess, _shapes(entries)), stacked=False)
        return self._run(self._preprocess, entries, target)

    def stack(self, layers: Iterator[Mapping[str, Entry]]) -> LayerParams:
        """Layers one after another into one stack that is written in place."""
        first = next(layers)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.hparams.layers, *leaf.shape), leaf.dtype),
            jax.eval_shape(self._preprocess, _shapes(first)),
        )
        target = self._layer_shardings(shapes, stacked=True)

        def put(leaves: Leaves, stack: LayerParams, index: jax.Array) -> LayerParams:
            return jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, index, 0),
                stack,
                self._preprocess(leaves),
            )

        def empty() -> LayerParams:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        stack = jax.jit(empty, out_shardings=target)()
        for index, entries in enumerate(itertools.chain((first,), layers)):
            stack = self._run(put, entries, target, stack, np.int32(index))
        return stack

    def _preprocess(self, leaves: Leaves) -> LayerParams:
        quantized = {
            key: QuantizedTensor(*leaf) if isinstance(leaf, tuple) else leaf for key, leaf in leaves.items()
        }
        dtype, storage = self.options.weights.float_dtype, self.options.storage
        return preprocess_layer(self.hparams, quantized, dtype, storage)

    def _layer_shardings(self, layer: LayerParams, *, stacked: bool) -> LayerParams | None:
        """Shardings of one layer, or of a stack of layers."""
        whole = Params(embedding=None, layers=layer if stacked else (layer,), final_norm=NormParams())
        target = self.options.shardings(whole)
        return None if target is None else target.layers if stacked else target.layers[0]

    def _run(self, program: Callable[..., Any], entries: Mapping[str, Entry], target: Any, *into: Any) -> Any:
        """Reads the entries to where the program wants them, and runs it; its second argument is donated.

        The result is awaited, and the leaves are let go, before the next ones are read.
        """
        shapes = _shapes(entries)
        key = (program, tuple(jax.tree.leaves(shapes)))
        if key not in self._compiled:
            jitted = jax.jit(program, donate_argnums=(1,) if into else (), out_shardings=target)
            self._compiled[key] = jitted.lower(shapes, *into).compile()
        compiled = self._compiled[key]
        leaves = self.reader.read(entries, compiled.input_shardings[0][0])
        return jax.block_until_ready(compiled(leaves, *into))


def _shapes(entries: Mapping[str, Entry]) -> Leaves:
    """Shapes of entries as a program is given them: an int8 kernel is a pair of value and scale."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(tuple(array.shape), jax.dtypes.canonicalize_dtype(array.dtype)),
        _pairs(entries),
        is_leaf=lambda node: not isinstance(node, (dict, tuple)),
    )


def _pairs(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {
        key: (entry.qvalue, entry.scale) if isinstance(entry, QuantizedTensor) else entry
        for key, entry in entries.items()
    }


def _nbytes(entry: Entry) -> int:
    if isinstance(entry, QuantizedTensor):
        return _nbytes(entry.qvalue) + _nbytes(entry.scale)
    return int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize


class _Reader:
    """Reads entries, several at a time, and reports the bytes."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def read(self, entries: Mapping[str, Entry], target: Any) -> Leaves:
        """The same entries as arrays, each where `target` says."""
        pairs = _pairs(entries)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as workers:
            arrays = workers.map(_place, pairs.values(), (target[key] for key in pairs))
            loaded = {}
            for (key, entry), array in zip(entries.items(), arrays, strict=True):
                loaded[key] = array
                self.done += _nbytes(entry)
                self.progress(self.done, self.total)
        return loaded


def _place(entry: Any, target: Any) -> Any:
    """Reads one leaf, or a pair, and puts its shards on their devices."""
    if isinstance(entry, tuple):
        return tuple(map(_place, entry, target))
    return jax.block_until_ready(jax.device_put(np.asarray(entry[...]), target))
