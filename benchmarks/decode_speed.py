"""Decode and prefill against what the machine can do: `python -m benchmarks.decode_speed [--json] [--quick]`.

At batch 1 every weight is read once a token, so reading them at memory speed bounds decoding. Machine and
variants are measured in turn, round after round, so that a slow minute meets all of them; medians are
compared, and the bounds are the best of the run. "beside" is the bare step's share of the memory speed that
was measured just before it: on a quiet machine the two shares agree, on a busy one only this one means much.

Data flow: model → `Subject` a batch → rounds of (machine, bare step, engine's step, whole path, prefill) →
medians and quartiles → table or JSON.

Worked example: 426 MB of weights in 25 ms a token are 17.0 GB/s; of a memory speed of 20 GB/s that is 85 %.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import variants
from checkpoints.formats import open_checkpoint
from checkpoints.load import LoadOptions, load_params
from checkpoints.state import CheckpointState
from checkpoints.synthetic import synthetic_state
from configs.models import palm_100m, palm_shakespeare
from inference_engine.cli.model import default_checkpoint
from inference_engine.profiling.host_speed import MatmulSpeed, MemorySpeed
from inference_engine.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from layers.errors import UserError

BATCHES = (1, 4, 8)
QUICK_BATCHES = (1,)
ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class BenchmarkModel:
    """What is measured: a name, weights, a tokenizer, and how many steps a timing takes."""

    name: str
    state: CheckpointState
    tokenizer: Tokenizer
    steps: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one variant over the rounds: median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """From single timings, at least two."""
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One model at one batch."""

    model: str
    batch: int
    weight_bytes: int
    prefill_flops: float
    timings: dict[str, Timing]
    beside: dict[str, float]  # share of the bound that was measured just before each timing, median

    def memory_share(self, variant: str, memory_speed: float) -> float:
        """Weight bytes a second over the memory speed."""
        return self.weight_bytes / self.timings[variant].median / memory_speed

    @property
    def overhead(self) -> float:
        """What the whole path takes beyond the bare step, as a share of that."""
        return self.timings["whole path"].median / self.timings["bare step"].median - 1


def models(quick: bool) -> list[BenchmarkModel]:
    """The default checkpoint (or its form with random weights) and a model beyond the caches."""
    factor = 8 if quick else 1
    form = palm_shakespeare()
    name, state = "palm_shakespeare, random", synthetic_state(form)
    tokenizer: Tokenizer = ByteTokenizer(form.vocab)
    with contextlib.suppress(UserError):
        opened = open_checkpoint(default_checkpoint())
        if opened.tokenizer_file is not None:
            name, state = "default checkpoint", opened.state
            tokenizer = SentencePieceTokenizer(opened.tokenizer_file)
    default = BenchmarkModel(name, state, tokenizer, 192 // factor)
    large = palm_100m()
    return [
        default,
        BenchmarkModel("palm_100m, random", synthetic_state(large), ByteTokenizer(large.vocab), 48 // factor),
    ]


def measure(
    model: BenchmarkModel,
    batches: Sequence[int],
    rounds: int,
    memory: MemorySpeed,
    matmul: MatmulSpeed,
    say: Console,
) -> list[Row]:
    """All batches of one model, in rounds."""
    hparams = model.state.hparams
    params = load_params(model.state, LoadOptions(stacked=False))
    runs: dict[tuple[int, str], Callable[[], float]] = {}
    for batch in batches:
        say.print(f"compiling {model.name}, batch {batch}")
        subject = variants.make_subject(hparams, params, model.tokenizer, batch, model.steps)
        runs[batch, "bare step"] = variants.bare(subject)
        runs[batch, "engine step"] = variants.engine_step(subject)
        runs[batch, "whole path"] = variants.whole_path(subject)
        if batch == 1:
            runs[batch, "prefill token"] = variants.prefill(subject)
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    flops = variants.prefill_flops(hparams)
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    beside: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):  # the first one warms up
        for (batch, name), run in runs.items():
            bounds = weight_bytes / memory.sample(), flops / matmul.sample()
            taken = run()
            if number:
                seconds[batch, name].append(taken)
                beside[batch, name].append(bounds[name == "prefill token"] / taken)
    return [
        Row(
            model.name,
            batch,
            weight_bytes,
            flops,
            {name: Timing.of(values) for (at, name), values in seconds.items() if at == batch},
            {name: statistics.median(values) for (at, name), values in beside.items() if at == batch},
        )
        for batch in batches
    ]


def decode_table(rows: Sequence[Row], memory_speed: float) -> Table:
    """Times of a decode step, and how near they are to reading the weights once."""
    table = Table(title="One decode step, ms: median (quartiles)", title_justify="left")
    for heading in ("model", "batch", "weights", "bare step", "engine step", "whole path"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bare/bound", "path/bound", "beside", "overhead", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        names = ("bare step", "engine step", "whole path")
        shares = (row.memory_share(name, memory_speed) for name in ("bare step", "whole path"))
        table.add_row(
            row.model,
            str(row.batch),
            f"{row.weight_bytes / 1e6:.0f} MB",
            *(_milliseconds(row.timings[name]) for name in names),
            *(f"{share:.0%}" for share in shares),
            f"{row.beside['bare step']:.0%}",
            f"{row.overhead:+.1%}",
            f"{row.batch / row.timings['whole path'].median:.0f}",
        )
    return table


def prefill_table(rows: Sequence[Row], matmul_speed: float) -> Table:
    """Prefill of one prompt against the matmul speed."""
    table = Table(title=f"Prefill of {variants.PREFILL_TOKENS - 1} tokens, one prompt", title_justify="left")
    for heading in ("model", "ms/token", "tokens/s", "GFLOP/s", "of matmul speed"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        if "prefill token" in row.timings:
            timing = row.timings["prefill token"]
            speed = row.prefill_flops / timing.median
            table.add_row(
                row.model,
                _milliseconds(timing),
                f"{1 / timing.median:.0f}",
                f"{speed / 1e9:.1f}",
                f"{speed / matmul_speed:.0%}",
            )
    return table


def _milliseconds(timing: Timing) -> str:
    return f"{timing.median * 1e3:.2f} ({timing.low * 1e3:.2f}–{timing.high * 1e3:.2f})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="few and short rounds, to see that it runs")
    parser.add_argument("--rounds", type=int, help=f"timings of each variant (default {ROUNDS})")
    parser.add_argument("--batches", type=int, nargs="*", help=f"slots (default {BATCHES})")
    flags = parser.parse_args()
    rounds = max(2, flags.rounds or (2 if flags.quick else ROUNDS))
    batches = flags.batches or (QUICK_BATCHES if flags.quick else BATCHES)
    memory, matmul = MemorySpeed(), MatmulSpeed()
    say = Console(file=sys.stderr)
    rows: list[Row] = []
    for model in models(flags.quick):
        rows += measure(model, batches, rounds, memory, matmul, say)
    where = f"{platform.machine()}, {os.cpu_count()} CPUs, jax {importlib.metadata.version('jax')}"
    if flags.json:
        record = {
            "machine": where,
            "memory_bytes_per_second": memory.best,
            "matmul_flops_per_second": matmul.best,
            "rows": [
                {
                    **dataclasses.asdict(row),
                    "overhead": row.overhead,
                    "bare_share_of_memory_speed": row.memory_share("bare step", memory.best),
                    "path_share_of_memory_speed": row.memory_share("whole path", memory.best),
                }
                for row in rows
            ],
        }
        sys.stdout.write(json.dumps(record) + "\n")
        return
    out = Console(width=None if sys.stdout.isatty() else 180)
    speeds = f"memory {memory.best / 1e9:.1f} GB/s with two threads, matmul {matmul.best / 1e9:.0f} GFLOP/s"
    out.print(f"{where}; best of the run: {speeds}")
    out.print(decode_table(rows, memory.best))
    out.print(prefill_table(rows, matmul.best))


if __name__ == "__main__":
    main()
