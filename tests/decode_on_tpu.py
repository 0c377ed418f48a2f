"""Compiles whole decode steps of PaLM for TPU slices that are not there, and reports on them as JSON.

It runs in a process of its own, since the TPU compiler's library wants its own environment:

    TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.decode_on_tpu

The last case is one text of 131,072 positions, dealt over all chips.

Worked example: 8B in bfloat16 on v5e:4x4 as 4,4,1 at batch 64 and context 2048: 1.25 GiB of weights and cache
a chip, of which the cache, donated, is 0.25.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from checkpoints.preprocess import preprocess
from checkpoints.state import QuantizedTensor, state_tensors
from checkpoints.storage import ChunkMajor
from configs.models import MODELS
from layers.attention import AttentionBlocks
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import CHUNK_AXES, AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.serial import ForwardOptions
from layers.transformer import MeshModel
from tests.scheduled_programs import Program

KEYS = 2048  # of a block of attention
BFLOAT16 = jnp.dtype("bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step in 2D; a context deals the cache's positions over its axes."""

    model: str
    topology: str
    mesh: str
    mode: str
    weights: str = "bfloat16"
    batch: int = 64
    trade: str = "yzx"
    context: str = "none"
    positions: int = 2048


SMALL, LARGE = ("palm_8b", "v5e:4x4", "4,4,1"), ("palm_540b", "v4:4x4x4", "4,4,4")
TESTED = (
    *(Case(*SMALL, mode.value) for mode in CollectiveMode),
    *(Case(*LARGE, "throughput", weights, batch) for weights in ("bfloat16", "int8") for batch in (64, 512)),
    Case(*SMALL, "reference", batch=1, trade="none", context="xy", positions=131_072),
)


def abstract_params(hparams: HParams, weights: str, storage: ChunkMajor) -> Params:
    """Shapes of the folded and stacked weights."""
    floats, pairs = {}, {}
    for key, spec in state_tensors(hparams).items():
        shape = spec.shape(hparams)
        if weights == "int8" and spec.contracted:
            scale = jax.ShapeDtypeStruct(shape[spec.contracted :], jnp.float32)
            pairs[key] = (jax.ShapeDtypeStruct(shape, jnp.int8), scale)
        else:
            floats[key] = jax.ShapeDtypeStruct(shape, BFLOAT16)

    def build(floats: dict, pairs: dict) -> Params:
        quantized = {key: QuantizedTensor(*pair) for key, pair in pairs.items()}
        return preprocess(hparams, floats | quantized, BFLOAT16, stacked=True, storage=storage)

    return jax.eval_shape(build, floats, pairs)


def slice_devices(topology: str) -> list[jax.Device]:
    """The chips of a slice; on v4 both cores of a chip are one device."""
    chip = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **chip).devices


def mesh_model(case: Case) -> MeshModel:
    """The model on its slice."""
    shape = MeshShape.parse(case.mesh)
    config = CollectiveConfig(CollectiveMode(case.mode))
    context = ContextSplit(case.context)
    sharding = ShardingConfig(Layout.WEIGHT_STATIONARY_2D, AttnAllToAll(case.trade), config, context)
    options = ForwardOptions("bfloat16", AttentionBlocks(keys=KEYS))
    return MeshModel(
        MODELS[case.model](), shape, make_mesh(shape, slice_devices(case.topology)), sharding, options
    )


def compile_decode(case: Case) -> tuple[jax.stages.Compiled, int]:
    """The step, and the bytes of its cache on a chip."""
    model = mesh_model(case)
    storage = ChunkMajor(model.sharding.layout.form.storage, model.shape)
    params = abstract_params(model.hparams, case.weights, storage)
    shape = model.cache_shape(case.batch, case.positions)
    cache = jax.eval_shape(lambda: KVCache.zeros(shape, BFLOAT16, stacked=True))

    def step(params: Params, cache: KVCache, tokens: jax.Array, at: jax.Array) -> tuple[jax.Array, KVCache]:
        x, cache = model.forward(params, tokens[:, None], at, cache)
        return model.logits(params, x, case.batch)[:, 0], cache

    specs = (model.param_specs(params), model.cache_specs(cache))
    row = jax.ShapeDtypeStruct((case.batch,), jnp.int32, sharding=NamedSharding(model.mesh, P()))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (params, cache),
        model.placed(specs),
    )
    sharded = model.sharded(step, (*specs, P(), P()), (P(None, CHUNK_AXES), specs[1]))
    compiled = jax.jit(sharded, donate_argnums=1).lower(*placed, row, row).compile()
    return compiled, cache.nbytes // model.shape.size


def report(case: Case) -> dict[str, object]:
    """What the tests want to know of one program."""
    compiled, cache_bytes = compile_decode(case)
    hparams, chips = MODELS[case.model](), MeshShape.parse(case.mesh).size
    program, memory = Program(compiled.as_text()), compiled.memory_analysis()
    smallest = min(hparams.embed * hparams.ff, cache_bytes * chips // 2 // hparams.layers) // chips
    return {
        **dataclasses.asdict(case),
        "cycles": program.cycles,
        "hops": [dataclasses.asdict(hop) for hop in program.hops()],
        "copies": [line for line in program.copies(smallest) if " copy(" in line or "transpose(" in line],
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": cache_bytes,
    }


def main() -> None:
    """JSON, one line a case; a number picks one."""
    picked = [TESTED[int(word)] for word in sys.argv[1:]]
    for case in picked or TESTED:
        print(json.dumps(report(case)), flush=True)


if __name__ == "__main__":
    main()
