"""What a layer moves: elements by collective, counted in the compiled program, equal the formulas.

`docs/layouts.md` prints the formulas. Here they are functions of the model's sizes, the mesh and the setting,
and the count is read from the text of the compiled program: the collectives of the layer loop's body, which
runs once a layer. A chip moves, over groups of n chips and with r elements in its result,

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
from layers.head_order import padded_batch
from layers.hparams import HParams
from layers.kv_cache import KVCache
from layers.layout import AttnAllToAll, Layout, ShardingConfig
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
NONE, Z, YZ, YZX = AttnAllToAll
PLAIN, ONE_WAY, THROUGHPUT, LATENCY = CollectiveMode
CASES = [
    ("palm", "2,2,2", ONE, NONE, PLAIN, 4), ("palm", "2,2,2", ONE, YZX, ONE_WAY, 8),
    ("palm", "4,1,2", ONE, Z, LATENCY, 3), ("palm", "8,1,1", ONE, YZX, THROUGHPUT, 8),
    ("palm", "1,2,4", ONE, YZ, PLAIN, 5), ("nine_heads_grouped", "2,1,3", ONE, Z, PLAIN, 3),
    ("palm", "2,2,2", TWO, NONE, PLAIN, 4), ("palm", "2,2,2", TWO, YZX, PLAIN, 3),
    ("palm", "4,2,1", TWO, YZ, LATENCY, 8), ("palm", "1,4,2", TWO, Z, ONE_WAY, 4),
    ("palm", "2,1,3", TWO, YZ, THROUGHPUT, 3), ("palm", "4,1,2", TWO, YZX, ONE_WAY, 1),
    ("nine_heads_grouped", "2,2,2", TWO, Z, PLAIN, 4), ("nine_heads_grouped", "4,2,1", TWO, NONE, LATENCY, 2),
]  # fmt: skip


def group_size(line: str) -> int:
    """Chips of one group of a collective, from either form of the text."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]", line)[1])


def counted(program: str) -> Traffic:
    """Traffic of the layer loop's body: every collective that is not in the entry computation."""
    traffic: Traffic = collections.defaultdict(float)
    inside = False
    for line in program.splitlines():
        if line.endswith("{") and "->" in line:
            inside = not line.startswith("ENTRY")
        found = _OP.search(line)
        if inside and found:
            sizes = [math.prod(map(int, dims.split(","))) for dims in _ARRAY.findall(found[1]) if dims]
            chips = 0 if found[2] == HOP else group_size(line)
            traffic[found[2]] += MOVED[found[2]](sum(sizes), chips) if chips != 1 else 0
    return {kind: moved for kind, moved in traffic.items() if moved}


def formula(hparams: HParams, mesh: MeshShape, sharding: ShardingConfig, rows: int) -> Traffic:
    """The same from sizes; `hparams` counts padded heads, `rows` tokens are fed, one a row of the batch."""
    x, yz, n = mesh.x, mesh.y * mesh.z, mesh.size
    heads, kv, ff = hparams.heads * hparams.qkv, 2 * hparams.kv_heads * hparams.qkv, hparams.ff
    traffic: Traffic = collections.defaultdict(float)
    ring = sharding.collectives.mode is not PLAIN
    gather, scatter = (HOP, HOP) if ring else (GATHER, SCATTER)
    if sharding.layout is TWO:
        traffic[GATHER] += rows * hparams.embed / x * (1 - 1 / yz)
        traffic[scatter] += rows * (2 * ff + heads) / yz * (1 - 1 / x)
        traffic[gather] += rows * (ff + heads) / yz * (1 - 1 / x)
        traffic[SCATTER] += rows * hparams.embed / x * (1 - 1 / yz)
    else:
        traffic[gather] += rows * hparams.embed * (1 - 1 / x)
        traffic[scatter] += rows * hparams.embed * (1 - 1 / x)
        traffic[SUM] += 2 * rows * hparams.embed / x * (1 - 1 / yz)
    traffic[SUM] += 2 * rows * (1 - 1 / x)  # the norm's mean square
    batch_shards, head_shards = sharding.batch_shards(mesh), sharding.head_shards(mesh)
    padded = padded_batch(rows, batch_shards)
    traffic[TRADE] += 2 * padded * heads / n * (1 - 1 / batch_shards)
    traffic[SCATTER] += padded * kv * (1 - 1 / batch_shards)
    kept = padded / batch_shards * kv * (1 - 1 / head_shards)
    whole = hparams.kv_heads % head_shards == 0
    traffic[SCATTER if whole else SUM] += kept if whole else 2 * kept
    return {kind: moved for kind, moved in traffic.items() if moved}


def compiled(name: str, mesh: MeshShape, sharding: ShardingConfig, rows: int) -> tuple[MeshModel, str]:
    """A decode step's forward pass on the mesh: the model and its program's text."""
    params = placed_params(name, mesh, sharding.layout)
    model = MeshModel(form(name), mesh, make_mesh(mesh), sharding)
    cache = jax.eval_shape(
        lambda: KVCache.zeros(model.cache_shape(rows, 8), jnp.dtype("float32"), stacked=True)
    )
    specs = (model.param_specs(params), model.cache_specs(cache), P(), P())

    def run(params: Params, cache: KVCache, tokens: jax.Array, start: jax.Array) -> tuple:
        return model.forward(params, tokens, start, cache)

    residual = P(None, None, sharding.layout.residual_axes)
    step = jax.jit(model.sharded(run, specs, (residual, specs[1])), in_shardings=model.placed(specs))
    tokens, start = np.zeros((rows, 1), np.int32), np.zeros((rows,), np.int32)
    return model, step.lower(params, cache, tokens, start).compile().as_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(v, "value", v)) for v in case))
def test_a_layer_moves_what_the_formulas_say(case: tuple) -> None:
    name, mesh, layout, setting, mode, rows = case
    shape, sharding = MeshShape.parse(mesh), ShardingConfig(layout, setting, CollectiveConfig(mode))
    model, program = compiled(name, shape, sharding, rows)
    assert counted(program) == pytest.approx(formula(model.padded, shape, sharding, rows))


def test_terms_add_up_to_the_short_formulas() -> None:
    """The short forms of docs/layouts.md: 2D and 1D without the norm and the keys and values."""
    hparams = HParams(layers=1, embed=48, ff=96, heads=8, kv_heads=1, qkv=16, vocab=71)
    mesh, rows = MeshShape(2, 2, 2), 4
    for layout, short in (
        (ONE, 2 * rows * 48 * (1 - 1 / 8)),
        (TWO, 2 * rows * 24 * (1 - 1 / 4) + rows * (3 * 96 + 2 * 128) / 4 * (1 - 1 / 2)),
    ):
        whole = sum(formula(hparams, mesh, ShardingConfig(layout), rows).values())
        norm, keys = 2 * rows * (1 - 1 / 2), 2 * rows * 32 * (1 - 1 / 8)
        assert whole - norm - keys == pytest.approx(short)
