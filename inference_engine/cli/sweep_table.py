"""Rows of a sweep as a table.

Worked example: a row is

    decode  2,2,2 2d     yzx        reference   float32 float32 8 128  4.03 3.91–4.20 1,985 12 % 3 %
"""

import io
from collections.abc import Sequence

from inference_engine.cli.terminal import Stream
from inference_engine.profiling.rows import Row, Status

WIDTH = 150
_FACTORS = ("step", "mesh", "layout", "attn_all_to_all", "collectives", "weights", "activation_dtype")
_NAMES = ("step", "mesh", "layout", "all-to-all", "collectives", "weights", "activation")
_NUMBERS = ("batch", "context", "ms/token", "spread", "tokens/s", "of memory", "of FLOPs", "compile")


def table(rows: Sequence[Row]) -> str:
    """The measured rows by step, batch and context, the fastest first; then a line for each other one."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _NAMES:
        shown.add_column(name, no_wrap=True)
    for name in _NUMBERS:
        shown.add_column(name, no_wrap=True, justify="right")
    for row in sorted((row for row in rows if row.timing is not None), key=_order):
        shown.add_row(*(str(row.setting[name]) for name in _FACTORS), *_figures(row))
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, force_terminal=Stream.OUT.is_terminal, highlight=False)
    if shown.row_count:
        console.print(shown)
    for row in rows:
        if row.status is not Status.OK:
            text.write(f"{row.status.value}: {' '.join(map(str, row.setting.values()))}: {row.reason}\n")
    return text.getvalue()


def _order(row: Row) -> tuple[str, int, int, float]:
    setting = row.setting
    return setting["step"], setting["batch"], setting["context"], row.figures["ms_per_token"]


def _figures(row: Row) -> tuple[str, ...]:
    timing, figures = row.timing, row.figures
    assert timing is not None
    scale = figures["ms_per_token"] / timing.median
    return (
        str(row.setting["batch"]),
        str(row.setting["context"]),
        f"{figures['ms_per_token']:.2f}",
        f"{timing.spread_low * scale:.2f}–{timing.spread_high * scale:.2f}",
        f"{figures['tokens_per_second']:,.0f}",
        share(figures["memory_share"]),
        share(figures["flops_share"]),
        f"{figures['compile_seconds']:.1f} s",
    )


def share(value: float | None) -> str:
    """A share of a bound; a dash where the bound is not known."""
    return "–" if value is None else f"{value:.1%}"
