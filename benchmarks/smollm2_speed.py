"""SmolLM2-135M beside transformers: `python -m benchmarks.smollm2_speed [--json] [--rounds N]`.

Both read the same GGUF, compute in float32 with two threads, take the prompt in one piece, and are measured
in turn in one process. A ratio is the median over the rounds of times of the same round, so that a slow
minute meets both. The bound at batch 1 is reading the weights once a token, at the memory speed measured just
before ("beside") and at the best of the run. Without the extra `oracles` this project alone is measured.

Data flow: name → file → `Subject` and transformers' model → rounds of (memory, ours, theirs) → tables.

Worked example: 538 MB of weights at 30 GB/s bound a token by 17.9 ms; a step of 21 ms is 85 % of that, and
where transformers takes 42 ms the ratio is 2.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import variants
from checkpoints.formats import open_checkpoint
from checkpoints.load import LoadOptions, load_params
from configs.pretrained import PRETRAINED
from inference_engine.pretrained import fetch
from inference_engine.profiling.host_speed import THREADS, MemorySpeed
from inference_engine.tokenizer import ByteTokenizer

BATCHES = (1, 8)
STEPS = 16
ROUNDS = 5
OURS = ("bare step", "engine step", "whole path")
THEIRS, PREFILL, THEIR_PREFILL = "transformers", "prefill", "transformers' prefill"

Run = Callable[[], float]
Seconds = Mapping[tuple[int, str], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds a step (of prefill: a token) of each variant, by rounds, and the memory speed before each."""

    weight_bytes: int
    seconds: Seconds
    memory: Seconds

    def median(self, batch: int, name: str) -> float:
        """Seconds of a variant."""
        return statistics.median(self.seconds[batch, name])

    def ratio(self, batch: int, slow: str, fast: str) -> float | None:
        """How many times as long `slow` takes, median of the rounds; None where one was not measured."""
        slower, faster = self.seconds.get((batch, slow)), self.seconds.get((batch, fast))
        if slower is None or faster is None:
            return None
        return statistics.median(a / b for a, b in zip(slower, faster, strict=True))

    def beside(self, batch: int, name: str) -> float:
        """Share of the memory speed measured just before, median of the rounds."""
        pairs = zip(self.seconds[batch, name], self.memory[batch, name], strict=True)
        return statistics.median(self.weight_bytes / taken / speed for taken, speed in pairs)


def theirs(path: Path) -> dict[tuple[int, str], Run]:
    """transformers' decode and prefill on the same tokens; nothing where it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return {}
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def prompt(batch: int, tokens: int) -> torch.Tensor:
        return torch.tensor(np.random.default_rng(0).integers(3, 256, (batch, tokens)))

    def decode(batch: int) -> float:
        with torch.inference_mode():
            out = model(prompt(batch, variants.PROMPT_TOKENS - 1), use_cache=True, logits_to_keep=1)
            tokens, cache = prompt(batch, 1), out.past_key_values
            began = time.perf_counter()
            for _ in range(STEPS):
                out = model(tokens, past_key_values=cache, use_cache=True)
                tokens = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            return (time.perf_counter() - began) / STEPS

    def prefill() -> float:
        ids = prompt(1, variants.PREFILL_TOKENS - 1)
        with torch.inference_mode():
            began = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            return (time.perf_counter() - began) / ids.shape[1]

    runs: dict[tuple[int, str], Run] = {(n, THEIRS): functools.partial(decode, n) for n in BATCHES}
    return runs | {(1, THEIR_PREFILL): prefill}


def measure(rounds: int, memory: MemorySpeed, say: Console) -> Measured:
    """Compiles everything, then measures it in turn; the first round warms up."""
    path = fetch(PRETRAINED["smollm2-135m"])
    state = open_checkpoint(path).state
    params = load_params(state, LoadOptions(stacked=False))
    other = theirs(path)
    if not other:
        say.print("transformers is not installed (extra oracles): only this project is measured")
    runs: dict[tuple[int, str], Run] = {}
    for batch in BATCHES:
        say.print(f"compiling batch {batch}")
        tokenizer = ByteTokenizer(state.hparams.vocab)
        subject = variants.make_subject(state.hparams, params, tokenizer, batch, STEPS)
        made = (variants.bare(subject), variants.engine_step(subject), variants.whole_path(subject))
        runs |= {(batch, name): run for name, run in zip(OURS, made, strict=True)}
        if batch == 1:
            runs[batch, PREFILL] = variants.prefill(variants.whole_prompts(subject))
        runs |= {key: run for key, run in other.items() if key[0] == batch}
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    speeds: dict[tuple[int, str], list[float]] = {key: [] for key in runs}
    for number in range(rounds + 1):
        for key, run in runs.items():
            speed, taken = memory.sample(), run()
            say.print(f"round {number} of {rounds}, batch {key[0]}, {key[1]}: {taken * 1e3:.2f} ms")
            if number:
                seconds[key].append(taken)
                speeds[key].append(speed)
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return Measured(weight_bytes, seconds, speeds)


def record(found: Measured, best: float) -> dict[str, object]:
    """What the tables say, as one JSON object."""
    return {
        "memory_bytes_per_second": best,
        "weight_bytes": found.weight_bytes,
        "seconds": [
            {"batch": at, "what": name, "rounds": list(s)} for (at, name), s in found.seconds.items()
        ],
        "decode": {batch: _decode(found, batch, best) for batch in BATCHES},
        "prefill_speedup": found.ratio(1, THEIR_PREFILL, PREFILL),
    }


def _decode(found: Measured, batch: int, best: float) -> dict[str, float | None]:
    return {
        "whole_path_speedup": found.ratio(batch, THEIRS, "whole path"),
        "overhead": (found.ratio(batch, "whole path", "bare step") or 1.0) - 1,
        "beside": found.beside(batch, "bare step"),
        "of_best": found.weight_bytes / found.median(batch, "bare step") / best,
    }


def decode_table(found: Measured, best: float) -> Table:
    """Times of a step, and what they are beside the bound and transformers."""
    table = Table(title="SmolLM2-135M, float32: one decode step, ms (median)", title_justify="left")
    compared = ("tokens/s", "times transformers'", "overhead", "beside", "of the best")
    for heading in ("batch", *OURS, THEIRS, *compared):
        table.add_column(heading, justify="right")
    for batch in BATCHES:
        shares = _decode(found, batch, best)
        speedup = shares["whole_path_speedup"]
        other = "–" if speedup is None else f"{found.median(batch, THEIRS) * 1e3:.1f}"
        table.add_row(
            str(batch),
            *(f"{found.median(batch, name) * 1e3:.1f}" for name in OURS),
            other,
            f"{batch / found.median(batch, 'whole path'):.0f}",
            "–" if speedup is None else f"{speedup:.2f}",
            f"{shares['overhead']:+.1%}",
            f"{shares['beside']:.0%}",
            f"{shares['of_best']:.0%}",
        )
    return table


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timings of each (default {ROUNDS})")
    flags = parser.parse_args()
    memory = MemorySpeed()
    found = measure(max(1, flags.rounds), memory, Console(file=sys.stderr))
    if flags.json:
        sys.stdout.write(json.dumps(record(found, memory.best)) + "\n")
        return
    out = Console(width=None if sys.stdout.isatty() else 160)
    speeds = sorted(speed for values in found.memory.values() for speed in values)
    middle = statistics.median(speeds)
    out.print(f"memory, two threads: median {middle / 1e9:.1f}, best {memory.best / 1e9:.1f} GB/s")
    out.print(decode_table(found, memory.best))
    line = f"prefill of {variants.PREFILL_TOKENS - 1} tokens: {1 / found.median(1, PREFILL):.0f} tokens/s"
    speedup = found.ratio(1, THEIR_PREFILL, PREFILL)
    if speedup is not None:
        line += f", transformers {1 / found.median(1, THEIR_PREFILL):.0f}, ratio {speedup:.2f}"
    out.print(line)


if __name__ == "__main__":
    main()
