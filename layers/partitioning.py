"""From dimension names to PartitionSpecs: how weights and caches are placed, as data.

A rule table maps a dim's name to the mesh axes that split it; `partition_spec` reads a spec off an array's
dim names. Two dims of one array on the same axis are a collision and are refused with both names.

Data flow: `WeightStorage` → `rules`, dim names → specs for every leaf of `Params` and `KVCache` → shardings.

Worked example: in 2D the embedding's dims (vocab, embed) map to (y, z) and x, so its spec is
P(('y', 'z'), 'x').
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from layers.errors import UserError
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import AttentionAxes, WeightStorage
from layers.mesh_shape import AXES, MeshShape
from layers.params import LayerParams, Params
from layers.quantization import Int8Weight

Rules = Mapping[str, tuple[str, ...]]

# Chunks of a matrix, and its own embed dim; see `checkpoints.storage`.
_WEIGHT_RULES: dict[WeightStorage, Rules] = {
    WeightStorage.ONE_D: {"chunks": ("y", "z", "x"), "chunk_embed": ()},
    WeightStorage.TWO_D: {"chunks": ("y", "z"), "chunk_embed": ("x",)},
}
_COMMON_RULES: Rules = {"vocab": ("y", "z"), "embed": ("x",), "kv_embed": AXES}

# Names of the dims of each matrix of a layer.
_INPUT_DIMS = ("chunks", "chunk_embed", None)
_OUTPUT_DIMS = ("chunks", None, "chunk_embed")
_MATRIX_DIMS: dict[str, tuple[str | None, ...]] = {
    "wi": _INPUT_DIMS,
    "wi_ff": _INPUT_DIMS,
    "wo": _OUTPUT_DIMS,
    "wo_ff": _OUTPUT_DIMS,
    "wkv": ("kv_embed", None),
}


def partition_spec(dims: Sequence[str | None], rules: Rules) -> P:
    """The spec of an array whose dims have these names; a name without a rule, or None, is not split.

    Raises ValueError naming both dims if two of them map to one axis.
    """
    owner: dict[str, str] = {}
    for dim in dims:
        if dim is None:
            continue
        for axis in rules.get(dim, ()):
            if axis in owner:
                raise ValueError(f"dims {owner[axis]} and {dim} are both split over mesh axis {axis}")
            owner[axis] = dim
    return P(*(rules.get(dim) or None if dim is not None else None for dim in dims))


def rules(storage: WeightStorage) -> Rules:
    """The whole table of a storage."""
    return {**_COMMON_RULES, **_WEIGHT_RULES[storage]}


def _matrix_spec(weight: Any, name: str, storage: WeightStorage, lead: tuple[None, ...]) -> Any:
    """The spec of an array, of its shape or of an `Int8Weight` of either; None for None."""
    if weight is None:
        return None
    spec = P(*lead, *partition_spec(_MATRIX_DIMS[name], rules(storage)))
    return Int8Weight(spec, P()) if isinstance(weight, Int8Weight) else spec


def _layer_specs(layer: LayerParams, storage: WeightStorage, lead: tuple[None, ...]) -> LayerParams:
    """Matrices by the table; vectors are on every chip, which slices what is its own."""
    vectors = {
        name: jax.tree.map(lambda _: P(), value)
        for name, value in vars(layer).items()
        if name not in _MATRIX_DIMS
    }
    matrices = {name: _matrix_spec(getattr(layer, name), name, storage, lead) for name in _MATRIX_DIMS}
    return LayerParams(**matrices, **vectors)


def param_specs(params: Params, storage: WeightStorage) -> Params:
    """Specs of every leaf; `params` may hold arrays or shapes."""
    table = rules(storage)
    layers: Any
    if isinstance(params.layers, tuple):
        layers = tuple(_layer_specs(layer, storage, ()) for layer in params.layers)
    else:
        layers = _layer_specs(params.layers, storage, (None,))
    head = params.lm_head
    return Params(
        embedding=partition_spec(("vocab", "embed"), table),
        layers=layers,
        final_norm=jax.tree.map(lambda _: P(), params.final_norm),
        lm_head=None if head is None else partition_spec(("vocab", "embed"), table),
        lm_head_bias=None if params.lm_head_bias is None else P(),
    )


def cache_specs(cache: KVCache, attention: AttentionAxes) -> KVCache:
    """Batch, heads, time of `[layers, batch, kv_heads, time, …]` over the axes that attention gives them."""
    table = {"batch": attention.batch, "kv_heads": attention.heads, "time": attention.context}
    spec = partition_spec(tuple(table), table)
    lead = (None,) if cache.stacked else ()
    return jax.tree.map(lambda _: P(*lead, *spec), cache)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The same tree with a `NamedSharding` for each spec."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )


def check_model(hparams: HParams, mesh: MeshShape) -> None:
    """Refuses sizes that a mesh cannot split; heads, vocabulary and batch are padded instead.

    Raises UserError with what would be legal.
    """
    for name in ("embed", "ff"):
        size = getattr(hparams, name)
        if size % mesh.size:
            chips = [n for n in range(1, size + 1) if hparams.embed % n == 0 and hparams.ff % n == 0]
            raise UserError(
                f"{name}={size} does not divide over the {mesh.size} chips of mesh "
                f"{mesh.x},{mesh.y},{mesh.z}; this model allows {_listed(chips)} chips; "
                f"nearest: {min(chips, key=lambda n: abs(n - mesh.size))}"
            )


def _listed(chips: list[int]) -> str:
    """The counts; of many the first ones and the last."""
    shown = 12
    if len(chips) <= shown:
        return ", ".join(map(str, chips))
    return f"{', '.join(map(str, chips[:shown]))}, … {chips[-1]}"
