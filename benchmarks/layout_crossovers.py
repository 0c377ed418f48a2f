"""Which layout moves least, drawn from the formulas: `python -m benchmarks.layout_crossovers [FOLDER]`.

Two plots of bytes that a chip moves in a layer of PaLM 540B, in bfloat16: 1D against 2D over the number of
chips (2D on the best factoring of each), and stationary against gathered over the tokens of a step on 4,4,4.
Both are estimates of traffic by formula (`layers.communication`), not measurements of time.

Data flow: `layer_terms` → bytes → lines → two PNG files in FOLDER (docs/images by default) and a table.

Worked example: on 4,4,4 the lines of 2D and X-gathered cross between 16,384 and 32,768 tokens.
"""

import itertools
import pathlib
import sys
from collections.abc import Sequence

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from configs.models import palm_540b
from inference_engine.cli.report import quantity
from layers.collectives.mode import CollectiveConfig
from layers.communication import ElementBytes, layer_terms, moved_bytes
from layers.head_order import padded_form
from layers.layout import Layout, ShardingConfig
from layers.mesh_shape import MeshShape, legal_shapes

MODEL = palm_540b()
CUBE = MeshShape(4, 4, 4)
SIZES = ElementBytes(weights=2, activations=2, sums=2)
BY_CHIPS = (Layout.WEIGHT_STATIONARY_1D, Layout.WEIGHT_STATIONARY_2D)
BY_TOKENS = (
    Layout.WEIGHT_STATIONARY_2D,
    Layout.WEIGHT_GATHERED_X,
    Layout.WEIGHT_GATHERED_XY,
    Layout.WEIGHT_GATHERED_XYZ,
)
LINES = ("-", "--", "-.", ":")
CHIPS = [2**power for power in range(1, 9)]
TOKENS = [2**power for power in range(6, 24)]
ROWS = 64
SEVERAL_DECADES = 100


def megabytes(layout: Layout, mesh: MeshShape, rows: int, time: int) -> float:
    """What a chip moves in a layer."""
    sharding = ShardingConfig(layout, collectives=CollectiveConfig(reduce_dtype="bfloat16"))
    return moved_bytes(layer_terms(padded_form(MODEL, mesh), mesh, sharding, rows, time), SIZES) / 1e6


def best_megabytes(layout: Layout, chips: int) -> float:
    """On the factoring of `chips` that moves least, for one decode step of 64 rows."""
    return min(megabytes(layout, shape, ROWS, 1) for shape in legal_shapes(chips))


def crossing(first: Sequence[float], second: Sequence[float], *, at: Sequence[int]) -> int | None:
    """The first place from which the second line lies below the first; None if there is none."""
    below = [b < a for a, b in zip(first, second, strict=True)]
    later = [place for place, won in zip(at, below, strict=True) if won]
    return later[0] if later and not below[0] else None


def plot(
    lines: dict[str, list[float]], at: Sequence[int], words: tuple[str, str], path: pathlib.Path
) -> None:
    """One line a layout, told apart by dashes as well as by colour."""
    title, label = words
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, values), style in zip(lines.items(), LINES, strict=False):
        axes.plot(at, values, style, label=name, linewidth=2)
    spread = max(map(max, lines.values())) / min(map(min, lines.values()))
    axes.set(
        xscale="log",
        yscale="log" if spread > SEVERAL_DECADES else "linear",
        xlabel=label,
        ylabel="MB moved by a chip in a layer",
        title=title,
    )
    axes.set_xticks(at[::2] if len(at) > 10 else at)
    axes.xaxis.set_major_formatter(lambda value, _: f"{quantity(round(value))}".strip())
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(title="layout")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draws both and prints where lines cross."""
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    folder.mkdir(parents=True, exist_ok=True)
    chips = {layout.value: [best_megabytes(layout, n) for n in CHIPS] for layout in BY_CHIPS}
    title = f"PaLM 540B, decoding {ROWS} rows, bfloat16: 1D and 2D by formula"
    plot(chips, CHIPS, (title, "chips"), folder / "crossover_chips.png")
    tokens = {
        layout.value: [megabytes(layout, CUBE, ROWS, t // ROWS) for t in TOKENS] for layout in BY_TOKENS
    }
    title = "PaLM 540B on 4,4,4, bfloat16: stationary and gathered by formula"
    plot(tokens, TOKENS, (title, "tokens of a step"), folder / "crossover_tokens.png")
    from_chips = crossing(*(chips[layout.value] for layout in BY_CHIPS), at=CHIPS)
    print(f"2D moves less than 1D from {from_chips} chips on")
    for before, after in itertools.pairwise(tokens):
        first = crossing(tokens[before], tokens[after], at=TOKENS)
        print(f"{after} moves less than {before} from {first or 'more'} tokens on")


if __name__ == "__main__":
    main()
