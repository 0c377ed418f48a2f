"""The command `sweep compare`: what changed between two results files, or between two settings; no jax.

Data flow: flags and paths → rows → `compare` → table or JSON.

Worked example: `sweep compare r.jsonl r.jsonl --before attn_all_to_all=none --after attn_all_to_all=yzx`
shows for every mesh, batch and so on whether the all-to-all pays.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path

from inference_engine.cli.flags import nearest, shown
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.terminal import Output, Stream, note
from inference_engine.profiling.compare import LEAST, Comparison, Pair, compare
from inference_engine.profiling.rows import Row
from inference_engine.profiling.spread import Change
from inference_engine.profiling.store import read_rows
from layers.errors import UserError

WIDTH = 140
OPERANDS = ("BEFORE.jsonl", "AFTER.jsonl")
_DESCRIPTION = (
    """Compares rows of two files that `sweep` wrote, cell by cell. A time has changed where the spreads do
    not overlap and the medians differ by --at_least; rows that were timed in turn are compared round by
    round. Rows that are no different are counted, and shown with --all.""",
    """With --before and --after two settings are compared: rows of the first file where a factor has one
    value, with rows of the second file (which may be the same) where it has another, all other factors
    being equal.""",
)
_EXAMPLES = (
    ("what changed", "before.jsonl after.jsonl"),
    ("does the all-to-all pay?", "r.jsonl r.jsonl --before attn_all_to_all=none --after attn_all_to_all=yzx"),
)
_STYLES = {Change.FASTER: "green", Change.SLOWER: "bold red", Change.SAME: "dim", None: "yellow"}


def compare_command() -> Command:
    """The command."""
    return Command(
        name="sweep compare",
        summary="what changed beyond noise between two results files",
        description=_DESCRIPTION,
        groups=(
            Group(
                "What is compared",
                (
                    Option("before", "factor of the first file's rows", metavar="NAME=VALUE",
                           repeatable=True),
                    Option("after", "factor of the second file's rows", metavar="NAME=VALUE",
                           repeatable=True),
                    Option("at_least", "share that a median has to change by", Kind.NUMBER, LEAST,
                           allowed="0 and above", metavar="X"),
                ),
            ),
            Group(
                "Output",
                (
                    Option("all", "also what is no different", Kind.SWITCH),
                    Option("json", "one JSON object on stdout", Kind.SWITCH),
                ),
            ),
        ),
        run=_run,
        examples=_EXAMPLES,
        operands=OPERANDS,
    )  # fmt: skip


def _run(flags: Flags, interrupts: Interrupts) -> int:
    del interrupts
    if not flags["at_least"] >= 0:
        raise UserError(f"--at_least={flags['at_least']} is not allowed; allowed: 0 and above; nearest: 0")
    paths = [flags[name] for name in OPERANDS]
    before, after = (_rows(Path(path)) for path in paths)
    fixed = [_factors(name, flags[name], rows) for name, rows in (("before", before), ("after", after))]
    found = compare(before, after, flags["at_least"], *fixed)
    if not found.pairs:
        raise UserError(
            f"no setting is in both: {len(before)} rows in {paths[0]}, {len(after)} in {paths[1]}"
        )
    Output().write(
        json.dumps(found.to_json()) + "\n" if flags["json"] else _table(found, everything=flags["all"])
    )
    for line in _remarks(before, after):
        note("caution", line, "yellow")
    note("", _summary(found), "dim")
    return 0


def _rows(path: Path) -> list[Row]:
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} holds no row of a sweep")
    return rows


def _factors(flag: str, texts: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    """The factors that one side fixes; raises UserError for one that no row has."""
    names = list(rows[0].setting)
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise UserError(
                f"--{flag}={shown(text)} is no factor and its value; allowed: NAME=VALUE with NAME one of "
                f"{', '.join(names)}{nearest(name, names)}"
            )
        values = list(dict.fromkeys(str(row.setting[name]) for row in rows))
        if value not in values:
            raise UserError(f"--{flag}={shown(text)}: no row has it; allowed: {', '.join(values)}")
        found[name] = value
    return found


def _remarks(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """What else is not the same."""

    def kinds(rows: Sequence[Row]) -> set[str]:
        return {row.device["kind"] for row in rows}

    def versions(rows: Sequence[Row]) -> set[str]:
        return {f"{name} {version}" for row in rows for name, version in row.versions.items()}

    lines = []
    for what, of in (("devices", kinds), ("versions", versions)):
        if of(before) != of(after):
            lines.append(f"{what} differ: {', '.join(sorted(of(before)))} and {', '.join(sorted(of(after)))}")
    return lines


def _summary(found: Comparison) -> str:
    counts = ", ".join(f"{found.count(kind)} {kind.value}" for kind in Change)
    ratio = "" if found.ratio is None else f"; median of all ratios {found.ratio:.3f}"
    only = f"; {len(found.only_before)} only before, {len(found.only_after)} only after"
    return f"{len(found.pairs)} settings in both: {counts}{ratio}{only}"


def _table(found: Comparison, *, everything: bool) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown_pairs = [pair for pair in found.pairs if everything or pair.change is not Change.SAME]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    varying = _varying([pair.before for pair in found.pairs])
    for name in varying:
        table.add_column(name, no_wrap=True)
    for name in ("before, ms", "after, ms", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for pair in shown_pairs:
        words = "" if pair.change is None else pair.change.value
        ratio = "–" if pair.ratio is None else f"{pair.ratio:.3f}"
        factors = (str(pair.before.setting[name]) for name in varying)
        table.add_row(*factors, *_times(pair), ratio, Text(words, style=_STYLES[pair.change]))
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=Stream.OUT.is_terminal, highlight=False)
    if shown_pairs:
        console.print(table)
    else:
        text.write("no difference\n")
    return text.getvalue()


def _varying(rows: Sequence[Row]) -> list[str]:
    """Factors that tell the rows apart; all where there is one row."""
    names = list(rows[0].setting)
    return [name for name in names if len({str(row.setting[name]) for row in rows}) > 1] or names


def _times(pair: Pair) -> tuple[str, str]:
    """Median and spread of both sides in ms, or what became of them."""
    shown_sides = []
    for row in (pair.before, pair.after):
        t = row.timing
        if t is None:
            shown_sides.append(row.status.value)
        else:
            shown_sides.append(f"{1e3 * t.median:.2f} ({1e3 * t.spread_low:.2f}–{1e3 * t.spread_high:.2f})")
    return shown_sides[0], shown_sides[1]
