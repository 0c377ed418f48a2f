"""Compiles whole prefill steps of PaLM for TPU slices that are not there, and reports on them as JSON.

    TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.prefill_on_tpu [--all]

`activation_bytes` is the formula of docs/layouts.md: what one layer's activations take on a chip.

The last tested case is one prompt of 32,768 tokens, dealt over all chips and on a ring.

Worked example: 540B in bfloat16 on v4:4x4x4, gathered over XYZ, 512 × 2048 tokens: 8 rows or 16,384 tokens a
chip.
"""

import dataclasses
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.storage import ChunkMajor
from configs.models import MODELS
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.communication import Collective
from layers.kv_cache import KVCache
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.prefill_memory import activation_bytes
from layers.serial import ForwardOptions
from layers.transformer import MeshModel
from tests.decode_on_tpu import BFLOAT16, abstract_params, slice_devices
from tests.scheduled_programs import ARRAY


@dataclasses.dataclass(frozen=True)
class Case:
    """One prefill step of whole prompts."""

    model: str
    topology: str
    mesh: str
    layout: str
    trade: str
    mode: str
    weights: str
    batch: int
    time: int
    context: str = "none"


SLICE_8B, SLICE_62B, SLICE_540B = ("v5e:4x4", "4,4,1"), ("v4:2x4x4", "2,4,4"), ("v4:4x4x4", "4,4,4")
TESTED = (
    Case("palm_540b", *SLICE_540B, "gathered_xyz", "none", "throughput", "bfloat16", 512, 2048),
    Case("palm_540b", *SLICE_540B, "2d", "none", "reference", "int8", 1, 2048),
    Case("palm_62b", *SLICE_62B, "gathered_xy", "none", "one_way", "bfloat16", 32, 2048),
    Case("palm_8b", *SLICE_8B, "2d", "none", "reference", "bfloat16", 1, 32_768, "xy"),
)
EVERYTHING = (
    *TESTED,
    Case("palm_8b", *SLICE_8B, "gathered_xy", "none", "throughput", "bfloat16", 64, 1024),
    Case("palm_62b", *SLICE_62B, "gathered_xyz", "none", "throughput", "bfloat16", 128, 2048),
    Case("palm_62b", *SLICE_62B, "2d_time_z", "none", "reference", "bfloat16", 1, 2048),
    Case("palm_8b", *SLICE_8B, "gathered_xy_time", "none", "throughput", "bfloat16", 1, 32_768),
)


def mesh_model(case: Case) -> MeshModel:
    """The model on its slice."""
    shape = MeshShape.parse(case.mesh)
    config = CollectiveConfig(CollectiveMode(case.mode), "bfloat16")
    context = ContextSplit(case.context)
    sharding = ShardingConfig(Layout(case.layout), AttnAllToAll(case.trade), config, context, ring=True)
    mesh = make_mesh(shape, slice_devices(case.topology))
    return MeshModel(MODELS[case.model](), shape, mesh, sharding, ForwardOptions("bfloat16"))


def compile_prefill(case: Case) -> tuple[jax.stages.Compiled, MeshModel, int]:
    """The step, its model, and the bytes of its cache on a chip."""
    model = mesh_model(case)
    params = abstract_params(
        model.hparams, case.weights, ChunkMajor(model.sharding.layout.form.storage, model.shape)
    )
    shape = model.cache_shape(case.batch, case.time)
    cache = jax.eval_shape(lambda: KVCache.zeros(shape, BFLOAT16, stacked=True))

    def step(params: Params, cache: KVCache, tokens: jax.Array) -> KVCache:
        return model.forward(params, tokens, jnp.zeros((), jnp.int32), cache)[1]

    specs = (model.param_specs(params), model.cache_specs(cache))
    everywhere = NamedSharding(model.mesh, P())
    tokens = jax.ShapeDtypeStruct((case.batch, case.time), jnp.int32, sharding=everywhere)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (params, cache),
        model.placed(specs),
    )
    sharded = model.sharded(step, (*specs, P()), specs[1])
    compiled = jax.jit(sharded, donate_argnums=1).lower(*placed, tokens).compile()
    return compiled, model, cache.nbytes // model.shape.size


def largest_array(text: str) -> int:
    """Elements of the largest array that the layer loop computes with, stacks of layers left out."""
    found = (array["dims"] for array in ARRAY.finditer(text) if array["dims"])
    shapes = ([int(size) for size in dims.split(",")] for dims in found)
    layers = {model().layers for model in MODELS.values()}
    return max(math.prod(shape) for shape in shapes if shape[0] not in layers)


def report(case: Case) -> dict[str, object]:
    """What the tests want to know of one program."""
    compiled, model, cache_bytes = compile_prefill(case)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return {
        **dataclasses.asdict(case),
        "collectives": {
            kind.value: len(re.findall(rf" {kind.value}(?:-start)?\(", text)) for kind in Collective
        },
        "largest_array": largest_array(text),
        "activation_bytes": activation_bytes(
            model.padded, model.shape, model.sharding, case.batch, case.time
        ),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": cache_bytes,
    }


def main() -> None:
    """JSON, one line a case; with --all those that take minutes too; a number picks one."""
    chosen = EVERYTHING if "--all" in sys.argv else TESTED
    picked = [EVERYTHING[int(word)] for word in sys.argv[1:] if word.isdigit()]
    for case in picked or chosen:
        print(json.dumps(report(case)), flush=True)


if __name__ == "__main__":
    main()
