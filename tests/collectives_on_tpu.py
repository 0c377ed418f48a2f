"""Compiles a loop of layers for TPUs that are not there, in each collective mode, and reports on it as JSON.

A layer is what surrounds attention in the 2D block of an 8B model: all-gather over y and z, matmul →
reduce-scatter over x, the gated product, all-gather → matmul over x, reduce-scatter over y and z. It runs in
a process of its own, since the TPU compiler's library wants its own environment:

    TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.collectives_on_tpu --table

Worked example: v5e:4x4 as 4,4,1, batch 64: a chip holds [32, 4, 1024, 2304] and [32, 4, 1280, 1024].
"""

import dataclasses
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.collectives.reductions import reduce_scatter
from layers.mesh import make_mesh
from layers.mesh_shape import AXES, MeshShape
from tests.scheduled_programs import Instruction, Program

LAYERS, EMBED, FF, HEAD_COLUMNS = 32, 4096, 16384, 4096
CYCLES_PER_MICROSECOND = {"v5e:4x4": 1500, "v4:2x2x4": 1050}
LINK_BYTES_PER_MICROSECOND, HOP_MICROSECONDS = 45_000, 1.0  # a link and direction; the latency is assumed


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    topology: str
    mesh: str
    mode: str
    weights: str = "bfloat16"
    reduce_dtype: str = "float32"
    batch: int = 64


def topology_mesh(case: Case) -> Mesh:
    """The mesh of a slice that need not be there; v4 counts a chip as one device."""
    chip = {"chip_config_name": "megacore"} if case.topology.startswith("v4") else {}
    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=case.topology, **chip)
    return make_mesh(MeshShape.parse(case.mesh), slice_.devices)


def lower(case: Case, mesh: Mesh) -> jax.stages.Lowered:
    """The loop of layers on the mesh."""
    chips, x_chips, dtype = mesh.size, mesh.shape["x"], jnp.bfloat16
    config = CollectiveConfig(CollectiveMode(case.mode), case.reduce_dtype)
    columns, rows = (HEAD_COLUMNS + 2 * FF) // chips, (HEAD_COLUMNS + FF) // chips
    heads, ff = HEAD_COLUMNS // chips, FF // chips

    def layer(index: jax.Array, x: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x, ("y", "z"), axis=2, tiled=True)
        h = matmul_reducescatter(gathered, wi, "x", config, layer=index).astype(dtype)
        q, w0, w1 = jnp.split(h, [heads, heads + ff], axis=-1)
        h = jnp.concatenate([q, w0 * (jnp.tanh(w0) + 1) * w1], axis=-1)
        partial = allgather_matmul(h, wo, "x", config, layer=index)
        return x + reduce_scatter(partial, ("y", "z"), case.reduce_dtype, dimension=2).astype(dtype)

    def chip(x: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
        return lax.fori_loop(0, LAYERS, lambda index, x: layer(index, x, wi, wo), x)

    weights = P(None, ("y", "z", "x"))
    specs = (P(None, None, AXES), weights, weights)
    shapes = [
        ((case.batch, 1, EMBED), dtype),
        ((LAYERS, chips * x_chips, EMBED // x_chips, columns), jnp.dtype(case.weights)),
        ((LAYERS, chips * x_chips, rows, EMBED // x_chips), jnp.dtype(case.weights)),
    ]
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))
        for (shape, kind), spec in zip(shapes, specs, strict=True)
    ]
    sharded = jax.shard_map(chip, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.jit(sharded, donate_argnums=0).lower(*arguments)


DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "s8": jnp.int8}


def walk(program: Program, cycles_per_microsecond: int) -> float:
    """Microseconds of one layer: estimated cycles in line, hops on links of their own."""
    now = 0.0
    links: dict[str, float] = {}
    ends: dict[str, float] = {}
    for instruction in program.body:
        if instruction.opcode == "collective-permute-start":
            link = instruction.text.split("source_target_pairs=")[1].split("}")[0]
            starts = max(now, links.get(link, 0.0))
            links[link] = ends[instruction.name] = starts + HOP_MICROSECONDS + wire(instruction, 1.0)
        elif instruction.opcode == "collective-permute-done":
            started = instruction.text.split("-done(")[1].split("%")[1].split(")")[0]
            now = max(now, ends[started])
        else:
            now += in_line(program, instruction) + instruction.cycles / cycles_per_microsecond
    return now


def in_line(program: Program, instruction: Instruction) -> float:
    """Microseconds of a collective that nothing runs beside: a ring that uses both directions."""
    fused = instruction.called.startswith("all-reduce-scatter")
    kind = "reduce-scatter" if fused else instruction.opcode
    if kind not in ("all-gather", "all-reduce", "reduce-scatter"):
        return 0.0
    chips = program.group(instruction)
    rounds = 2 if kind == "all-reduce" else 1
    whole = chips if kind == "reduce-scatter" else 1  # the printed shape is the result's
    once = HOP_MICROSECONDS * (chips // 2) + wire(instruction, whole * (chips - 1) / chips / 2)
    return rounds * once


def wire(instruction: Instruction, share: float) -> float:
    """Microseconds that a share of an instruction's array takes on one link."""
    size = instruction.elements * np.dtype(DTYPES[instruction.dtype]).itemsize
    return share * size / LINK_BYTES_PER_MICROSECOND


def report(case: Case) -> dict[str, object]:
    """What the tests and the table want to know of one program."""
    mesh = topology_mesh(case)
    compiled = lower(case, mesh).compile()
    program = Program(compiled.as_text())
    smallest_chunk = (EMBED // mesh.shape["x"]) * ((HEAD_COLUMNS + FF) // mesh.size)
    memory = compiled.memory_analysis()
    return {
        **dataclasses.asdict(case),
        "cycles": program.cycles,
        "microseconds": walk(program, CYCLES_PER_MICROSECOND[case.topology]),
        "hops": [dataclasses.asdict(hop) for hop in program.hops()],
        "reductions": program.reductions(),
        "copies": program.copies(smallest_chunk // 2),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


SLICES = (("v5e:4x4", "4,4,1"), ("v4:2x2x4", "4,2,2"))
MODES = tuple(mode.value for mode in CollectiveMode)
TESTED = [
    *(Case(*slice_, mode) for slice_, mode in itertools.product(SLICES, MODES)),
    *(Case(*SLICES[0], mode, weights="int8") for mode in MODES),
    *(Case(topology, "16,1,1", "reference") for topology, _ in SLICES),
]
TABLE = [
    Case(*slice_, mode, **form)
    for slice_, form, mode in itertools.product(
        SLICES,
        ({}, {"reduce_dtype": "bfloat16"}, {"weights": "int8"}, {"batch": 512}),
        MODES,
    )
]


def main() -> None:
    """JSON of the tested programs; with --table the lines of the documentation's table."""
    if "--table" not in sys.argv:
        print(json.dumps([report(case) for case in TESTED]))
        return
    for case in TABLE:
        found = report(case)
        hops = found["hops"]
        covered = sum(hop["matmul_cycles"] > 0 for hop in hops)
        print(
            f"| {case.topology} | {case.weights} | {case.reduce_dtype} | {case.batch} | {case.mode} | "
            f"{found['cycles'] / 1000:.0f} | {covered} of {len(hops)} | {found['microseconds']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
