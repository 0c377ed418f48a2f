"""What a layer moves over a chip's links, by formula: exact for every layout, all-to-all and mesh.

A chip moves, over groups of n chips and with r elements in its result,

    all-gather r·(1 − 1/n)   reduce-scatter r·(n − 1)   all-reduce 2·r·(1 − 1/n)   all-to-all r·(1 − 1/n)
    collective-permute r

The rings move what the plain collectives move, as hops. These are counts of elements, not times: what
overlaps with a matmul costs nothing, what travels over several links at once costs less. Source: Pope et
al., 2022, "Efficiently Scaling Transformer Inference", §3.2, extended by padding, keys and values, and
norms.

Data flow: padded HParams, MeshShape, ShardingConfig, rows × time → `Term`s → traffic by collective, or bytes.

Worked example: 2D on 2,2,2, 4 tokens, embed 48: the gather over y and z ends with 4·24 elements a chip, of
which 3/4 come from others: 72.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator

from layers.collectives.mode import CollectiveMode
from layers.head_order import KVFactors
from layers.hparams import HParams
from layers.layout import LayoutForm, ShardingConfig, WeightStorage
from layers.mesh_shape import MeshShape


class Collective(enum.Enum):
    """Kinds of traffic, under the names that compiled programs give them."""

    GATHER = "all-gather"
    SCATTER = "reduce-scatter"
    SUM = "all-reduce"
    TRADE = "all-to-all"
    HOP = "collective-permute"


class Carries(enum.Enum):
    """What an element is, which decides its dtype."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    SUMS = "sums"
    FLOAT32 = "float32"


@dataclasses.dataclass(frozen=True)
class Term:
    """Elements that a chip moves in a layer for one purpose."""

    purpose: str
    collective: Collective
    carries: Carries
    elements: int | float


@dataclasses.dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element of each kind."""

    weights: int = 2
    activations: int = 2
    sums: int = 4
    float32: int = 4


def layer_terms(
    hparams: HParams, mesh: MeshShape, sharding: ShardingConfig, rows: int, time: int
) -> tuple[Term, ...]:
    """Everything that one layer of a fused block moves, for `rows` sequences of `time` tokens each.

    `hparams` counts padded heads; rows are padded here as the layout pads them.
    """
    step = _Step(hparams, mesh, sharding, rows, time)
    form = sharding.layout.form
    projections = step.gathered() if form.gathered else _STATIONARY[form.storage](step)
    terms = (*projections, *step.attention())
    return tuple(term for term in terms if term.elements)


def traffic(terms: Iterable[Term]) -> dict[Collective, float]:
    """Elements by collective."""
    total: dict[Collective, float] = collections.defaultdict(float)
    for term in terms:
        total[term.collective] += term.elements
    return dict(total)


def moved_bytes(terms: Iterable[Term], sizes: ElementBytes) -> float:
    """Bytes that a chip moves."""
    return float(sum(term.elements * getattr(sizes, term.carries.value) for term in terms))


def _over(elements: int | float, chips: int) -> float:
    """What a chip gets from others of `elements` that it has after gathering over `chips`."""
    return elements * (1 - 1 / chips)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One layer of one step; counts are of the whole mesh but for those named `mine`."""

    hparams: HParams
    mesh: MeshShape
    sharding: ShardingConfig
    rows: int
    time: int

    @property
    def form(self) -> LayoutForm:
        return self.sharding.layout.form

    @property
    def tokens(self) -> int:
        """Tokens of the residual, padding included."""
        return self.sharding.padded_rows(self.rows, self.mesh) * self.time

    @property
    def q_width(self) -> int:
        return self.hparams.heads * self.hparams.qkv

    @property
    def kv_width(self) -> int:
        return 2 * self.hparams.kv_heads * self.hparams.qkv

    @property
    def in_width(self) -> int:
        return self.q_width + self.hparams.ff * (2 if self.hparams.act.gated else 1)

    @property
    def out_width(self) -> int:
        return self.q_width + self.hparams.ff

    def _ring(self, plain: Collective) -> Collective:
        """A collective that is joined to a matmul."""
        reference = self.sharding.collectives.mode is CollectiveMode.REFERENCE
        return plain if reference else Collective.HOP

    def one_d(self) -> Iterator[Term]:
        """Weight-stationary 1D."""
        x, yz, embed = self.mesh.x, self.mesh.y * self.mesh.z, self.hparams.embed
        once = _over(self.tokens * embed, x)
        yield Term("residual", self._ring(Collective.GATHER), Carries.ACTIVATIONS, once)
        yield Term("residual", self._ring(Collective.SCATTER), Carries.SUMS, once)
        total = 2 * _over(self.tokens * embed / x, yz)
        yield Term("residual", Collective.SUM, Carries.SUMS, total)
        yield self._norm()

    def two_d(self) -> Iterator[Term]:
        """Weight-stationary 2D, whatever of the residual is split over z."""
        x, yz = self.mesh.x, self.mesh.y * self.mesh.z
        residual = _over(self.tokens * self.hparams.embed / x, yz)
        yield Term("residual", Collective.GATHER, Carries.ACTIVATIONS, residual)
        inner, outer = (_over(self.tokens * width / yz, x) for width in (self.in_width, self.out_width))
        yield Term("columns", self._ring(Collective.SCATTER), Carries.SUMS, inner)
        yield Term("columns", self._ring(Collective.GATHER), Carries.ACTIVATIONS, outer)
        yield Term("residual", Collective.SCATTER, Carries.SUMS, residual)
        yield self._norm()

    def gathered(self) -> Iterator[Term]:
        """Weight-gathered over N of n chips."""
        n, size = self.mesh.size, self.mesh.over(self.form.gathered)
        embed = self.hparams.embed
        matrices = _over(embed * (self.in_width + self.out_width) * size / n, size)
        yield Term("weights", self._ring(Collective.GATHER), Carries.WEIGHTS, matrices)
        keys = _over(embed * self.kv_width * size / n, size)
        yield Term("weights of k and v", Collective.GATHER, Carries.WEIGHTS, keys)
        residual = _over(self.tokens / size * embed, n // size)
        yield Term("residual", Collective.GATHER, Carries.ACTIVATIONS, residual)
        yield Term("residual", Collective.SCATTER, Carries.SUMS, residual)

    def _norm(self) -> Term:
        """The mean square over x; a norm that is centred moves as much again."""
        return Term("norm", Collective.SUM, Carries.FLOAT32, 2 * _over(self.tokens, self.mesh.x))

    def attention(self) -> Iterator[Term]:
        """Trades of heads for rows or times, sums of k and v, and what positions that are dealt cost."""
        attention, mesh = self.sharding.attention, self.mesh
        traded, joined = mesh.over(attention.traded), mesh.over(attention.joined)
        projected = self.time // mesh.over(self.form.stays_split[1])  # times of the projections, mine
        rows = self.sharding.cache_rows(self.rows, mesh) // mesh.over(attention.batch)  # of attention, mine
        q = rows * projected * self.q_width * traded * mesh.over(attention.held) / mesh.size
        yield Term("heads for rows", Collective.TRADE, Carries.ACTIVATIONS, 2 * _over(q, traded))
        if attention.ring:
            yield Term("heads for times", Collective.TRADE, Carries.ACTIVATIONS, 2 * _over(q, joined))
        else:
            yield Term("heads", Collective.GATHER, Carries.ACTIVATIONS, _over(q * joined, joined))
        kv = rows * projected * self.kv_width
        yield Term("k and v", Collective.SCATTER, Carries.SUMS, _over(kv * traded, traded))
        if attention.ring:
            yield Term("k and v", Collective.SCATTER, Carries.SUMS, _over(kv, joined))
        factors = KVFactors.of(self.hparams.kv_heads, *mesh.sizes)
        own = self._product(axis for axis in attention.heads if getattr(factors, axis) == mesh.over(axis))
        shared = mesh.over(attention.heads) // own * (1 if attention.ring else joined)
        kept = rows * (self.time // mesh.over(attention.time)) * self.kv_width
        yield Term("k and v", Collective.SCATTER, Carries.SUMS, _over(kept, own))
        yield Term("k and v", Collective.SUM, Carries.SUMS, 2 * _over(kept / own, shared))
        yield from self._dealt(rows, factors)

    def _dealt(self, rows: int, factors: KVFactors) -> Iterator[Term]:
        """Attention over dealt positions: one walk of keys round the ring, or one joining of results.

        A walk moves as many keys a chip as a step has tokens a chip: a prompt's first chunk needs one, its
        n-th n. Each key goes with its position and segment.
        """
        attention, mesh, qkv = self.sharding.attention, self.mesh, self.hparams.qkv
        chips = mesh.over(attention.context)
        if attention.ring:
            keys = rows * (self.time // chips)
            hops = (chips - 1) * keys
            on_a_chip = 2 * factors.on_a_chip(attention.heads) * qkv
            yield Term("keys on a ring", Collective.HOP, Carries.ACTIVATIONS, hops * on_a_chip)
            yield Term("places on a ring", Collective.HOP, Carries.FLOAT32, hops * 2)
        else:
            found = rows * self.time * self.hparams.heads // mesh.over(attention.heads) * (qkv + 2)
            yield Term("softmax", Collective.SUM, Carries.FLOAT32, 2 * _over(found, chips))

    def _product(self, axes: Iterable[str]) -> int:
        return self.mesh.over(tuple(axes))


_STATIONARY = {WeightStorage.ONE_D: _Step.one_d, WeightStorage.TWO_D: _Step.two_d}


def insert_elements(
    hparams: HParams, mesh: MeshShape, prefill: ShardingConfig, decode: ShardingConfig, time: int
) -> float:
    """Elements that a chip moves to put one prefilled row of `time` positions into its slot, all layers.

    `hparams` counts padded heads. See `layers.cache_insert`: one sum over the axes that split the prefix's
    rows and those that split its kv heads and will no longer, and one gather where positions are dealt over
    other axes than they will be.
    """
    source, target = prefill.attention, decode.attention
    leaving = tuple(axis for axis in source.heads if axis not in target.heads)
    factors = KVFactors.of(hparams.kv_heads, *mesh.sizes)
    kept = tuple(axis for axis in source.heads if axis in target.heads)
    mine = math.ceil(time / mesh.over(source.context))
    row = 2 * hparams.layers * mine * hparams.qkv * factors.on_a_chip(kept)
    summed = 2 * _over(row, mesh.over(source.batch + leaving))
    if source.context == target.context:
        return summed
    chips = mesh.over(source.context)
    return summed + _over(row * chips, chips)
