"""Which layouts prefill and decoding run in, where the user leaves it open: those that move fewest bytes.

Decoding is chosen first, since most of a request's time goes there; prefill is then chosen among the layouts
that share its copy of the weights. The count is `layers.communication`'s, per chip and layer, for the batch
and length of one step. It is a count of bytes, not a measurement: on equal terms the plainer layout wins.

Data flow: flags → `LayoutRequest` → `choose_layouts` → `Layouts` → MeshModels.

Worked example: PaLM 540B on 4,4,4, bfloat16, decoding 64 rows: 2D moves 4.4 MB a chip and layer, 1D 9.2 MB,
XYZ-gathered 145 MB. For a prefill of 512 × 2048 tokens the order is the reverse: gathered over XYZ wins.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from layers.collectives.mode import CollectiveConfig
from layers.communication import ElementBytes, layer_terms, moved_bytes
from layers.errors import UserError
from layers.head_order import padded_form
from layers.hparams import HParams
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig, check_chunk, check_pair
from layers.mesh_shape import MeshShape

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class LayoutRequest:
    """What was asked for; None is open.

    Attributes:
      prefill, decode: layouts.
      attn_all_to_all, collectives: see `ShardingConfig`.
      prefill_context, decode_context: over which axes either deals positions.
      decodes: whether anything is decoded; scoring is prefill alone, and all that was asked for is its own.
    """

    prefill: Layout | None = Layout.WEIGHT_STATIONARY_2D
    decode: Layout | None = Layout.WEIGHT_STATIONARY_2D
    attn_all_to_all: AttnAllToAll = AttnAllToAll.NONE
    collectives: CollectiveConfig = CollectiveConfig()
    prefill_context: ContextSplit = ContextSplit.NONE
    decode_context: ContextSplit = ContextSplit.NONE
    decodes: bool = True


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step of each kind computes: rows of the batch, and tokens a row of a prefill chunk."""

    slots: int
    prefill_rows: int
    prefill_chunk: int
    sizes: ElementBytes = ElementBytes()


@dataclasses.dataclass(frozen=True)
class Layouts:
    """What runs; `reasons` has one line for each layout that was chosen here."""

    prefill: ShardingConfig
    decode: ShardingConfig
    reasons: tuple[str, ...] = ()


def choose_layouts(request: LayoutRequest, hparams: HParams, mesh: MeshShape, work: Workload) -> Layouts:
    """Both steps' layouts, legal together.

    Raises UserError for a request that cannot run, with the reason.
    """
    padded = padded_form(hparams, mesh)
    if not request.decodes:
        return _prefill_alone(request, padded, mesh, work)
    decodes = [request.decode] if request.decode else list(Layout)
    prefills = [request.prefill] if request.prefill else list(Layout)
    pairs = _legal_pairs(request, decodes, prefills, mesh, work.prefill_chunk)
    decode, why_decode = _fewest_bytes("decode", padded, mesh, [d for _, d in pairs], (work.slots, 1), work)
    beside = [prefill for prefill, d in pairs if d == decode]
    chunk = (work.prefill_rows, work.prefill_chunk)
    prefill, why_prefill = _fewest_bytes("prefill", padded, mesh, beside, chunk, work)
    reasons = ((request.decode, why_decode), (request.prefill, why_prefill))
    return Layouts(prefill, decode, tuple(why for asked, why in reasons if asked is None))


def _legal_pairs(
    request: LayoutRequest,
    decodes: Iterable[Layout],
    prefills: list[Layout],
    mesh: MeshShape,
    chunk: int,
) -> list[tuple[ShardingConfig, ShardingConfig]]:
    """(prefill, decode) that can run; raises the first refusal if none can."""

    def pair(layout: Layout, other: Layout) -> tuple[ShardingConfig, ShardingConfig]:
        decode = ShardingConfig(layout, request.attn_all_to_all, request.collectives, request.decode_context)
        prefill = decode.for_prefill(other, request.prefill_context)
        check_pair(prefill, decode, mesh)
        check_chunk(prefill, chunk, mesh)
        return prefill, decode

    return _that_run(functools.partial(pair, *layouts) for layouts in itertools.product(decodes, prefills))


def _that_run(makers: Iterable[Callable[[], Made]]) -> list[Made]:
    """What can be made; raises the first refusal if nothing can."""
    refusals, made = [], []
    for make in makers:
        try:
            made.append(make())
        except UserError as error:
            refusals.append(error)
    if not made:
        raise refusals[0]
    return made


def _prefill_alone(request: LayoutRequest, padded: HParams, mesh: MeshShape, work: Workload) -> Layouts:
    """The layout of texts that are only read, as both steps'."""

    def prefill(layout: Layout) -> ShardingConfig:
        trade, context = request.attn_all_to_all, request.prefill_context
        made = ShardingConfig(layout, trade, request.collectives, context, ring=True)
        check_chunk(made, work.prefill_chunk, mesh)
        return made

    layouts = [request.prefill] if request.prefill else list(Layout)
    choices = _that_run(functools.partial(prefill, layout) for layout in layouts)
    chunk = (work.prefill_rows, work.prefill_chunk)
    chosen, why = _fewest_bytes("prefill", padded, mesh, choices, chunk, work)
    return Layouts(chosen, chosen, () if request.prefill else (why,))


def _fewest_bytes(
    step: str,
    padded: HParams,
    mesh: MeshShape,
    choices: list[ShardingConfig],
    tokens: tuple[int, int],
    work: Workload,
) -> tuple[ShardingConfig, str]:
    """The cheapest choice, the first of equals, and why."""
    moved = {
        choice: moved_bytes(layer_terms(padded, mesh, choice, *tokens), work.sizes)
        for choice in dict.fromkeys(choices)
    }
    first, *rest = sorted(moved, key=lambda choice: moved[choice])
    others = f", {rest[0].layout.value} {_kilobytes(moved[rest[0]])}" if rest else ""
    rows, time = tokens
    return first, (
        f"{step} layout {first.layout.value}: for {rows} × {time} tokens it moves "
        f"{_kilobytes(moved[first])} a chip and layer{others}"
    )


def _kilobytes(count: float) -> str:
    return f"{count / 1e3:,.1f} kB"
