"""Memory and time of attention over a ring, both passes: `python -m benchmarks.ring_memory [--json]`.

One float32 kv head with 4 query heads of width 64, causal, in zigzag order over 8 host devices, and the
same on one device. Memory is what the compiler allocates a device: inputs, outputs and temporaries; the
bound is inputs, outputs and two chunks of keys and values. A matmul is timed in the same run, for a share
of what the machine can do.

Data flow: a length → compiled forward and backward → its allocation; with --rounds also its time → table or
JSON.

Worked example: 131,072 tokens on 8 devices are 16,384 a device: q 16.8 MB, k and v 4.2 MB each; with
d_output, output, dq, dk and dv 83.9 MB; two chunks of k and v 16.8 MB.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from inference_engine.profiling.host_speed import MatmulSpeed
from layers.ring_attention import AttentionForm, ring_attention
from layers.ring_schedule import TokenOrder

HEADS, KV_HEADS, QKV = 4, 1, 64
MATMULS = 2 + 5  # forward q·k and weights·v; backward the scores again and four more


@dataclasses.dataclass(frozen=True)
class Row:
    """One length on so many devices; bytes are of one device."""

    tokens: int
    devices: int
    inputs_and_outputs: int
    temporaries: int
    two_chunks: int
    seconds: float | None
    matmul_share: float | None

    @property
    def ratio(self) -> float:
        """Allocation over inputs, outputs and two chunks."""
        return (self.inputs_and_outputs + self.temporaries) / (self.inputs_and_outputs + self.two_chunks)


def compile_step(tokens: int, devices: int) -> tuple[jax.stages.Compiled, NamedSharding]:
    """Forward and backward of a text."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))
    form, spec = AttentionForm(is_causal=True, order=TokenOrder.ZIGZAG), P(None, "x")
    ring = jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, "x", form), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def step(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(ring, q, k, v)
        return output, *pull(d_output)

    sharding = NamedSharding(mesh, spec)
    shapes = [
        jax.ShapeDtypeStruct((1, tokens, heads, QKV), jnp.float32, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return jax.jit(step).lower(*shapes).compile(), sharding


def measure(tokens: int, devices: int, rounds: int, matmul: MatmulSpeed) -> Row:
    """Allocation, and the median time of some rounds."""
    compiled, sharding = compile_step(tokens, devices)
    rng = np.random.default_rng(0)
    seconds, shares = [], []
    if rounds:
        arrays = [
            jax.device_put(rng.normal(size=(1, tokens, heads, QKV)).astype(np.float32), sharding)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
    for _ in range(rounds):
        speed = matmul.sample()
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - began)
        flops = MATMULS * 2 * tokens * (tokens + 1) / 2 * HEADS * QKV
        shares.append(flops / seconds[-1] / speed)
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not say what it allocates"
    return Row(
        tokens,
        devices,
        memory.argument_size_in_bytes + memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        2 * 2 * (tokens // devices) * KV_HEADS * QKV * 4,
        statistics.median(seconds) if seconds else None,
        statistics.median(shares) if shares else None,
    )


def table_of(rows: list[Row]) -> Table:
    """One line a length and number of devices."""
    table = Table(title="Forward and backward, causal, a device", title_justify="left")
    for heading in (
        "tokens",
        "devices",
        "in + out, MB",
        "temp, MB",
        "two chunks, MB",
        "ratio",
        "s",
        "of matmul",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            str(row.devices),
            *(f"{x / 1e6:.1f}" for x in (row.inputs_and_outputs, row.temporaries, row.two_chunks)),
            f"{row.ratio:.2f}",
            "" if row.seconds is None else f"{row.seconds:.1f}",
            "" if row.matmul_share is None else f"{row.matmul_share:.0%}",
        )
    return table


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--tokens", type=int, nargs="*", default=[131_072], help="lengths")
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 1], help="host devices of a ring")
    parser.add_argument("--rounds", type=int, default=0, help="timings of each; 0 compiles only")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(flags.devices))
    say, matmul = Console(file=sys.stderr), MatmulSpeed()
    rows = []
    for tokens in flags.tokens:
        for devices in flags.devices:
            say.print(f"{tokens:,} tokens on {devices} devices")
            rows.append(measure(tokens, devices, flags.rounds, matmul))
    if flags.json:
        record = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
        sys.stdout.write(json.dumps({"rows": record, "matmul_flops_per_second": matmul.best}) + "\n")
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(rows))


if __name__ == "__main__":
    main()
