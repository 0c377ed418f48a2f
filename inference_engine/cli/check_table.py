"""The rows of `check` as a table of at most 120 columns.

Worked example: a row is

    2d     gathered_xy yzx –   z   latency int8 f32 f32 auto own 3    5   2.1e-06 equal  0    ok
"""

import io
from collections.abc import Sequence

from inference_engine.checking.run import Row
from inference_engine.cli.terminal import Stream

WIDTH = 120
_NAMES = (
    "decode", "prefill", "a2a", "ctx", "pre", "mode", "wts", "act", "sum", "kv", "prefix", "rows",
    "len", "error", "tokens", "ties", "",
)  # fmt: skip
_SHORT = {"float32": "f32", "bfloat16": "bf16", "none": "–"}


def table(rows: Sequence[Row]) -> str:
    """The rows, one a line under a line of names; coloured where stdout is a terminal."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _NAMES:
        shown.add_column(name, no_wrap=True)
    for row in rows:
        case = row.case.to_json()
        settings = [_SHORT.get(str(value), str(value)) for value in case.values()]
        outcome = ("[green]ok[/]",) if row.ok else ("[bold red]DIFFERS[/]",)
        tokens = "equal" if row.tokens_equal else "differ"
        shown.add_row(*settings, f"{row.max_rel_err:.1e}", tokens, str(row.ties), *outcome)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=Stream.OUT.is_terminal, highlight=False)
    console.print(shown)
    return text.getvalue()
