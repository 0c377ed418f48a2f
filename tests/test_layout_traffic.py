"""What a layer moves: elements by collective, counted in the compiled program, equal the formulas.

The formulas are those of `layers.communication` and docs/layouts.md; the count is read from the text of the
compiled program: the collectives of the layer loop's body, which runs once a layer. A chip moves, over groups
of n chips and with r elements in its result,

    all-gather r·(1 − 1/n)   reduce-scatter r·(n − 1)   all-reduce 2·r·(1 − 1/n)   all-to-all r·(1 − 1/n)
    collective-permute r

Worked example: 2D on 2,2,2, 4 tokens, embed 48: the gather over y and z ends with 4·24 elements a chip, of
which 3/4 come from others: 72.
"""

import collections
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.communication import layer_terms, traffic
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import AttnAllToAll, ContextSplit, Layout, ShardingConfig
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params
from layers.transformer import MeshModel
from tests.mesh_models import form, placed_params

GATHER, SCATTER, SUM = "all-gather", "reduce-scatter", "all-reduce"
TRADE, HOP = "all-to-all", "collective-permute"
Traffic = dict[str, float]
"""Elements that a chip moves in a layer, by collective."""

MOVED: dict[str, Callable[[int, int], float]] = {
    GATHER: lambda r, n: r * (1 - 1 / n),
    SCATTER: lambda r, n: r * (n - 1),
    SUM: lambda r, n: 2 * r * (1 - 1 / n),
    TRADE: lambda r, n: r * (1 - 1 / n),
    HOP: lambda r, n: r,
}
_OP = re.compile(rf"= (.+?) ({'|'.join(MOVED)})(?:-start)?\(")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")

ONE, TWO = Layout.WEIGHT_STATIONARY_1D, Layout.WEIGHT_STATIONARY_2D
BATCH_Z, TIME_Z = Layout.WEIGHT_STATIONARY_2D_BATCH_Z, Layout.WEIGHT_STATIONARY_2D_TIME_Z
GX, GXY, GXYZ = Layout.WEIGHT_GATHERED_X, Layout.WEIGHT_GATHERED_XY, Layout.WEIGHT_GATHERED_XYZ
GX_TIME, GXY_TIME = Layout.WEIGHT_GATHERED_X_TIME, Layout.WEIGHT_GATHERED_XY_TIME
GXYZ_TIME = Layout.WEIGHT_GATHERED_XYZ_TIME
NONE, Z, YZ, YZX = AttnAllToAll
PLAIN, ONE_WAY, THROUGHPUT, LATENCY = CollectiveMode
CASES = [
    ("palm", "2,2,2", ONE, NONE, PLAIN, 4), ("palm", "2,2,2", ONE, YZX, ONE_WAY, 8),
    ("palm", "4,1,2", ONE, Z, LATENCY, 3), ("palm", "8,1,1", ONE, YZX, THROUGHPUT, 8),
    ("palm", "1,2,4", ONE, YZ, PLAIN, 5), ("nine_heads_grouped", "2,1,3", ONE, Z, PLAIN, 3),
    ("palm", "2,2,2", TWO, NONE, PLAIN, 4), ("palm", "2,2,2", TWO, YZX, PLAIN, 3),
    ("palm", "4,2,1", TWO, YZ, LATENCY, 8), ("palm", "1,4,2", TWO, Z, ONE_WAY, 4),
    ("palm", "2,1,3", TWO, YZ, THROUGHPUT, 3), ("palm", "4,1,2", TWO, YZX, ONE_WAY, 1),
    ("palm", "2,2,2", BATCH_Z, YZ, PLAIN, 4), ("palm", "2,1,3", BATCH_Z, NONE, ONE_WAY, 4),
    ("palm", "2,2,2", TIME_Z, NONE, PLAIN, 1), ("palm", "2,1,3", TIME_Z, Z, LATENCY, 3),
    ("palm", "2,2,2", GX, YZ, PLAIN, 3), ("palm", "4,2,1", GX, NONE, ONE_WAY, 4),
    ("palm", "2,2,2", GXY, Z, THROUGHPUT, 8), ("palm", "4,2,1", GXY, NONE, LATENCY, 8),
    ("palm", "2,2,2", GXYZ, NONE, PLAIN, 8), ("nine_heads_grouped", "2,1,3", GXYZ, NONE, ONE_WAY, 6),
    ("palm", "2,2,2", GX_TIME, NONE, PLAIN, 1), ("nine_heads_grouped", "2,2,2", GXY_TIME, Z, ONE_WAY, 1),
    ("palm", "4,2,1", GXYZ_TIME, NONE, THROUGHPUT, 1),
    ("nine_heads_grouped", "2,2,2", TWO, Z, PLAIN, 4), ("nine_heads_grouped", "4,2,1", TWO, NONE, LATENCY, 2),
]  # fmt: skip
PREFILLS, DECODES = True, False
DEALT = [
    ("palm", "2,2,2", TWO, NONE, "xyz", PREFILLS, 1),
    ("nine_heads_grouped", "2,2,2", TIME_Z, YZ, "x", PREFILLS, 3),
    ("palm", "2,1,3", GX, NONE, "z", PREFILLS, 4),
    ("nine_heads_grouped", "2,1,3", ONE, NONE, "z", PREFILLS, 2),
    ("palm", "2,2,2", TWO, Z, "xy", DECODES, 2),
    ("nine_heads_grouped", "2,2,2", TWO, NONE, "yz", DECODES, 3),
    ("palm", "4,2,1", ONE, NONE, "xyz", DECODES, 1),
    ("nine_heads_grouped", "2,1,3", GX, NONE, "z", DECODES, 2),
]


def group_size(line: str) -> int:
    """Chips of one group of a collective, from either form of the text."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]", line)[1])


def counted(program: str) -> Traffic:
    """Traffic of the layer loop's body: every collective that is not in the entry computation.

    One in a loop inside it counts by the loop's trips, where the compiler knows them, else once.
    """
    return _counted(program, lambda line: not line.startswith("ENTRY"), _trips(program))


def counted_everywhere(program: str) -> Traffic:
    """Traffic of a program without loops."""
    return _counted(program, lambda line: True, {})


def _trips(program: str) -> dict[str, int]:
    """How often each loop's body runs for one run of the layer loop's body, by the body's name."""
    inside, trips = "", dict[str, int]()
    for line in program.splitlines():
        if line.endswith("{") and "->" in line:
            inside = "" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
        body = re.search(r" while\(.*body=%([\w.\-]+)", line)
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        if body and inside:  # the layer loop is in the entry
            trips[body[1]] = int(known[1]) if known else 1
    return trips


def _counted(program: str, wanted: Callable[[str], bool], trips: dict[str, int]) -> Traffic:
    """Traffic of the computations whose first line is wanted."""
    traffic: Traffic = collections.defaultdict(float)
    inside, times = False, 1
    for line in program.splitlines():
        if line.endswith("{") and "->" in line:
            inside, times = wanted(line), trips.get(line.split()[0].lstrip("%"), 1)
        found = _OP.search(line)
        if inside and found:
            sizes = [math.prod(map(int, dims.split(","))) for dims in _ARRAY.findall(found[1]) if dims]
            chips = 0 if found[2] == HOP else group_size(line)
            traffic[found[2]] += times * MOVED[found[2]](sum(sizes), chips) if chips != 1 else 0
    return {kind: moved for kind, moved in traffic.items() if moved}


def time_of(sharding: ShardingConfig, mesh: MeshShape) -> int:
    """Tokens a row: one, or as many as the layout splits time into."""
    return sharding.time_shards(mesh)


def compiled(name: str, mesh: MeshShape, sharding: ShardingConfig, rows: int) -> tuple[MeshModel, str]:
    """A step's forward pass on the mesh: the model and its program's text."""
    params = placed_params(name, mesh, sharding.layout)
    model = MeshModel(form(name), mesh, make_mesh(mesh), sharding)
    cache = jax.eval_shape(
        lambda: KVCache.zeros(model.cache_shape(rows, 16), jnp.dtype("float32"), stacked=True)
    )
    specs = (model.param_specs(params), model.cache_specs(cache), P(), P())

    def run(params: Params, cache: KVCache, tokens: jax.Array, start: jax.Array) -> tuple:
        return model.forward(params, tokens, start, cache)

    lies = sharding.layout.form
    residual = P(lies.batch or None, lies.time or None, lies.embed or None)
    step = jax.jit(model.sharded(run, specs, (residual, specs[1])), in_shardings=model.placed(specs))
    tokens = np.zeros((rows, time_of(sharding, mesh)), np.int32)
    start = np.zeros(() if sharding.attention.ring else (rows,), np.int32)
    return model, step.lower(params, cache, tokens, start).compile().as_text()


def found_and_said(name: str, mesh: str, sharding: ShardingConfig, rows: int) -> tuple[Traffic, Traffic]:
    """What a layer of the compiled step moves, and what the formulas say."""
    shape = MeshShape.parse(mesh)
    model, program = compiled(name, shape, sharding, rows)
    said = traffic(layer_terms(model.padded, shape, sharding, rows, time_of(sharding, shape)))
    return counted(program), {kind.value: elements for kind, elements in said.items()}


def _id(value: object) -> str:
    return "-".join(str(getattr(v, "value", v)) for v in value)


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_layer_moves_what_the_formulas_say(case: tuple) -> None:
    name, mesh, layout, setting, mode, rows = case
    sharding = ShardingConfig(layout, setting, CollectiveConfig(mode))
    found, said = found_and_said(name, mesh, sharding, rows)
    assert found == pytest.approx(said)


@pytest.mark.parametrize("case", DEALT, ids=_id)
def test_dealt_positions_move_what_the_formulas_say(case: tuple) -> None:
    name, mesh, layout, setting, context, prefills, rows = case
    sharding = ShardingConfig(layout, setting, CollectiveConfig(), ContextSplit(context), prefills)
    found, said = found_and_said(name, mesh, sharding, rows)
    assert found == pytest.approx(said)


@pytest.mark.parametrize("case", [case for case in DEALT if case[5] == DECODES], ids=_id)
def test_a_decode_step_joins_dealt_positions_in_two_small_sums(case: tuple) -> None:
    name, mesh, layout, setting, context, _, rows = case
    shape = MeshShape.parse(mesh)
    dealt = ShardingConfig(layout, setting, context=ContextSplit(context))
    plain = ShardingConfig(layout, setting)
    programs = [compiled(name, shape, sharding, rows)[1] for sharding in (dealt, plain)]
    sums = [len(re.findall(r" all-reduce(?:-start)?\(", program)) for program in programs]
    assert sums[0] <= sums[1] + 2
    assert not re.search(r" collective-permute(?:-start)?\(", programs[0])


HPARAMS = HParams(layers=1, embed=48, ff=96, heads=8, kv_heads=1, qkv=16, vocab=71)
E, F, HD = HPARAMS.embed, HPARAMS.ff, HPARAMS.heads * HPARAMS.qkv
BESIDE = ("norm", "k and v", "weights of k and v")


def _short(layout: Layout, mesh: MeshShape, tokens: int) -> float:
    """Elements for weights, residual and columns."""
    terms = layer_terms(HPARAMS, mesh, ShardingConfig(layout), tokens, 1)
    return sum(term.elements for term in terms if term.purpose not in BESIDE)


@pytest.mark.parametrize("mesh", ["2,2,2", "4,2,1", "2,1,3", "4,4,4"])
def test_stationary_terms_add_up_to_the_short_formulas(mesh: str) -> None:
    shape, tokens = MeshShape.parse(mesh), 12
    n, x, yz = shape.size, shape.x, shape.y * shape.z
    assert _short(ONE, shape, tokens) == pytest.approx(2 * tokens * E * (1 - 1 / n))
    wanted = 2 * tokens * E / x * (1 - 1 / yz) + tokens * (3 * F + 2 * HD) / yz * (1 - 1 / x)
    assert _short(TWO, shape, tokens) == pytest.approx(wanted)
    assert _short(Layout.WEIGHT_STATIONARY_2D_BATCH_Z, shape, tokens) == pytest.approx(wanted)


@pytest.mark.parametrize("mesh", ["2,2,2", "4,2,1", "2,1,3", "4,4,4"])
@pytest.mark.parametrize("layout", [GX, GXY, GXYZ], ids=lambda layout: layout.value)
def test_gathered_terms_add_up_to_the_short_formula(layout: Layout, mesh: str) -> None:
    shape, tokens = MeshShape.parse(mesh), 64 * 6
    n, size = shape.size, shape.over(layout.form.gathered)
    weights = (3 * E * F + 2 * E * HD) * size / n * (1 - 1 / size)
    assert _short(layout, shape, tokens) == pytest.approx(weights + 2 * tokens * E / size * (1 - size / n))
