"""Does a second measurement fall where the first one said? `python -m benchmarks.repeatability [--tries N]`.

Runs one small sweep again and again, each time in a process of its own, and counts how often a try's median
lies within the spread that the try before had stated, and how often `compare` finds a difference where there
is none. Every try compiles its own programs, as a sweep does.

Data flow: N processes of `sweep` → N results files → pairs of tries → shares.

Worked example: 11 tries of 4 cells are 40 pairs of neighbours; at 9 in 10, 36 of them hold.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from inference_engine.profiling.compare import LEAST, compare
from inference_engine.profiling.rows import Row
from inference_engine.profiling.spread import Change
from inference_engine.profiling.store import read_rows

TRIES = 11
WORDS = (
    "sweep", "--mesh", "2,2,2", "--layout", "1d,2d", "--attn_all_to_all", "none,yzx", "--context", "32",
)  # fmt: skip
REPO = Path(__file__).resolve().parent.parent


def measure(folder: Path, number: int, more: list[str]) -> list[Row]:
    """One try."""
    out = folder / f"try_{number}.jsonl"
    words = [sys.executable, str(REPO / "run_serving.py"), *WORDS, *more, "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True)
    return read_rows(out)


def holds(before: Row, after: Row) -> bool:
    """Whether a try's median lies within the spread that the other one stated."""
    assert before.timing is not None and after.timing is not None
    return before.timing.spread_low <= after.timing.median <= before.timing.spread_high


def within(tries: list[list[Row]]) -> tuple[int, int]:
    """How many medians of a next try lie within the spread of the one before, and of how many."""
    hits = [
        holds(row, {other.config: other for other in after}[row.config])
        for before, after in itertools.pairwise(tries)
        for row in before
    ]
    return sum(hits), len(hits)


def differing(tries: list[list[Row]]) -> tuple[int, int]:
    """How many pairs of the same cell in neighbouring tries `compare` calls different, and of how many."""
    pairs = [pair for a, b in itertools.pairwise(tries) for pair in compare(a, b, LEAST).pairs]
    return sum(pair.change is not Change.SAME for pair in pairs), len(pairs)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=TRIES)
    flags, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        tries = []
        for number in range(max(2, flags.tries)):
            print(f"try {number + 1} of {max(2, flags.tries)}", file=sys.stderr)
            tries.append(measure(Path(name), number, more))
    hits, of = within(tries)
    wrong, pairs = differing(tries)
    print(f"within the spread of the try before: {hits} of {of} ({hits / of:.0%})")
    print(f"called different though nothing changed: {wrong} of {pairs} ({wrong / pairs:.1%})")


if __name__ == "__main__":
    main()
