"""Compiles ring attention for TPUs that are not there, forward and backward, and reports on it as JSON.

What the compiled program says: that Mosaic takes the kernels, how often keys travel, whether a kernel lies
between the start of a hop and its end, and what it holds in memory. It runs in a process of its own, since
the TPU compiler's library wants its own environment:

    TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 python -m tests.ring_on_tpu

Worked example: v5e:2x4, 8 chips in one ring, 4,096 tokens a chip: 7 hops forward, each beside a kernel.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from layers.pallas_blocks import PallasBlocks
from layers.ring_attention import AttentionForm, ring_attention
from layers.ring_schedule import TokenOrder
from tests.scheduled_programs import Program, instructions

HEADS, KV_HEADS = 8, 2
TOPOLOGIES = {
    "v4": {"topology_name": "v4:2x2x2", "chip_config_name": "megacore"},
    "v5e": {"topology_name": "v5e:2x4"},
    "v5p": {"topology_name": "v5p:2x2x2"},
    "v6e": {"topology_name": "v6e:2x4"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a ring of 8 chips."""

    generation: str
    dtype: str = "bfloat16"
    qkv: int = 128
    chunk: int = 4096
    order: str = "zigzag"
    soft_cap: float | None = None


CASES = [
    *(Case(generation) for generation in TOPOLOGIES),
    Case("v5e", dtype="float32", qkv=64, chunk=1000, order="contiguous", soft_cap=30.0),
]


def compile_case(case: Case) -> jax.stages.Compiled:
    """The ring over all chips of the slice."""
    slice_ = topologies.get_topology_desc(platform="tpu", **TOPOLOGIES[case.generation])
    devices = np.array(slice_.devices)
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    order = TokenOrder(case.order)
    form = AttentionForm(is_causal=True, order=order, soft_cap=case.soft_cap, kernel=PallasBlocks())
    spec = P(None, "x")
    ring = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, "x", form), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(ring, q, k, v)
        return output, *pull(d_output)

    shapes = [
        jax.ShapeDtypeStruct(
            (1, case.chunk * devices.size, heads, case.qkv),
            jnp.dtype(case.dtype),
            sharding=NamedSharding(mesh, spec),
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(step).lower(*shapes).compile()


def hops(text: str) -> list[dict[str, object]]:
    """Each hop: whether it is in a loop, what it carries, and the kernels between its start and its end."""
    program = Program(text)
    found = []
    for name, block in program.computations.items():
        in_loop = f"body=%{name}," in text or f"body=%{name}\n" in text
        running: dict[str, dict[str, object]] = {}
        for instruction in instructions(block):
            if instruction.opcode == "collective-permute-start":
                hop = {"in_loop": in_loop, "dtype": instruction.dtype, "elements": instruction.elements}
                running[instruction.name] = {**hop, "kernels": 0}
            elif instruction.opcode == "collective-permute-done":
                found.append(running.pop(instruction.text.split("-done(")[1].split("%")[1].split(")")[0]))
            elif "tpu_custom_call" in instruction.text:
                running = {key: {**hop, "kernels": hop["kernels"] + 1} for key, hop in running.items()}
    return found


def report(case: Case) -> dict[str, object]:
    """What the tests want to know."""
    compiled = compile_case(case)
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    return {
        **dataclasses.asdict(case),
        "hops": hops(text),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "gathers": sum(text.count(f" {name}(") for name in ("all-gather", "all-to-all", "all-reduce")),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    """JSON of all programs."""
    print(json.dumps([report(case) for case in CASES]))


if __name__ == "__main__":
    main()
