"""What travels: hops, bytes and their order in every mode, in the traced and in the compiled program.

Idea: a mode is a promise about communication, and results alone do not show whether it is kept. The traced
program is a graph of hops and products; its hops are counted by direction and size, its longest chain of
hops is the mode's number of hop times, and each hop must have a product that neither waits for the other.
What the TPU compiler makes of it is read from its own schedule (`-m tpu_compiler`).

Worked example, LATENCY, 4 chips: one hop on, two back; the longest chain is 2.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from layers.collectives.matmuls import allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.mesh import make_mesh
from layers.mesh_shape import AXES, MeshShape
from tests.tpu_programs import reports_of

BATCH, ROWS, COLS = 3, 11, 7
FUNCTIONS = {"allgather_matmul": allgather_matmul, "matmul_reducescatter": matmul_reducescatter}
WIDTH = {"allgather_matmul": ROWS, "matmul_reducescatter": COLS}  # of what travels
SIZES = (1, 2, 3, 4, 5, 8)

Hops = dict[tuple[int, int], int]  # (direction, elements) → how many
PROMISED = {
    CollectiveMode.ONE_WAY: lambda n, width: {(+1, width): n - 1},
    CollectiveMode.THROUGHPUT: lambda n, width: {(+1, (width + 1) // 2): n - 1, (-1, width // 2): n - 1},
    CollectiveMode.LATENCY: lambda n, width: {(+1, width): (n - 1) // 2, (-1, width): n // 2},
}
HOP_TIMES = {
    CollectiveMode.ONE_WAY: lambda n: n - 1,
    CollectiveMode.THROUGHPUT: lambda n: n - 1,
    CollectiveMode.LATENCY: lambda n: n // 2,
}
RINGS = pytest.mark.parametrize("mode", PROMISED, ids=lambda mode: mode.value)
NAMES = pytest.mark.parametrize("name", FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Node:
    """A hop (ppermute), a product (dot_general) or a collective, and the numbers of all that it waits for."""

    kind: str
    elements: int
    dtype: str
    direction: int
    waits_for: frozenset[int]


KINDS = ("ppermute", "dot_general", "all_gather", "reduce_scatter")


@functools.cache
def traced(name: str, mode: CollectiveMode, chips: int, reduce_dtype: str = "float32") -> list[Node]:
    """One function over axis x, with x and w in bfloat16."""
    config = CollectiveConfig(mode, reduce_dtype)
    sharded = jax.shard_map(
        lambda x, w: FUNCTIONS[name](x[0], w[0], "x", config)[None],
        mesh=make_mesh(MeshShape(chips, 1, 1)),
        in_specs=P(AXES),
        out_specs=P(AXES),
    )
    x = jax.ShapeDtypeStruct((chips, BATCH, ROWS), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((chips, chips, ROWS, COLS), jnp.bfloat16)
    (boundary,) = jax.make_jaxpr(sharded)(x, w).jaxpr.eqns
    nodes: list[Node] = []
    waits: dict[object, frozenset[int]] = {}
    for equation in boundary.params["jaxpr"].eqns:
        assert "jaxpr" not in equation.params, "a graph within the graph would hide its hops"
        sources = [waits.get(atom, frozenset()) for atom in equation.invars if not isinstance(atom, Literal)]
        behind = frozenset().union(*sources)
        if equation.primitive.name in KINDS:
            operand = equation.invars[0].aval
            shift = dict(equation.params["perm"])[0] if equation.primitive.name == "ppermute" else 0
            direction = 0 if equation.primitive.name != "ppermute" else (1 if shift == 1 else -1)
            kind, dtype = equation.primitive.name, str(operand.dtype)
            nodes.append(Node(kind, operand.size, dtype, direction, behind))
            behind |= {len(nodes) - 1}
        waits.update(dict.fromkeys(equation.outvars, behind))
    return nodes


def hop_numbers(nodes: list[Node]) -> list[int]:
    return [number for number, node in enumerate(nodes) if node.kind == "ppermute" and node.elements]


@RINGS
@NAMES
@pytest.mark.parametrize("chips", [n for n in SIZES if n != 2])  # two chips are neighbours both ways
def test_hops_are_as_many_and_as_large_as_the_mode_promises(
    name: str, mode: CollectiveMode, chips: int
) -> None:
    nodes = traced(name, mode, chips)
    counted: Hops = {}
    for number in hop_numbers(nodes):
        key = (nodes[number].direction, nodes[number].elements // BATCH)
        counted[key] = counted.get(key, 0) + 1
    promised = PROMISED[mode](chips, WIDTH[name])
    assert counted == {key: count for key, count in promised.items() if count}


@RINGS
@NAMES
@pytest.mark.parametrize("chips", SIZES)
def test_the_longest_chain_of_hops_is_the_mode_s_number_of_hop_times(
    name: str, mode: CollectiveMode, chips: int
) -> None:
    nodes = traced(name, mode, chips)
    depth: dict[int, int] = {}
    for number in hop_numbers(nodes):
        depth[number] = 1 + max((depth.get(other, 0) for other in nodes[number].waits_for), default=0)
    assert max(depth.values(), default=0) == HOP_TIMES[mode](chips)


@RINGS
@NAMES
@pytest.mark.parametrize("chips", SIZES)
def test_every_hop_has_a_product_that_can_run_beside_it(name: str, mode: CollectiveMode, chips: int) -> None:
    nodes = traced(name, mode, chips)
    products = [number for number, node in enumerate(nodes) if node.kind == "dot_general"]
    lonely = [
        hop
        for hop in hop_numbers(nodes)
        if not any(p not in nodes[hop].waits_for and hop not in nodes[p].waits_for for p in products)
    ]
    assert not lonely


@NAMES
def test_one_chip_communicates_nothing(name: str) -> None:
    for mode in PROMISED:
        assert [node.kind for node in traced(name, mode, 1)] == ["dot_general"]


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", CollectiveMode, ids=lambda mode: mode.value)
def test_partial_sums_travel_in_the_dtype_asked_for(mode: CollectiveMode, reduce_dtype: str) -> None:
    moved = [n for n in traced("matmul_reducescatter", mode, 4, reduce_dtype) if n.kind != "dot_general"]
    assert {node.dtype for node in moved} == {reduce_dtype}
    gathered = [n for n in traced("allgather_matmul", mode, 4, reduce_dtype) if n.kind != "dot_general"]
    assert {node.dtype for node in gathered} == {"bfloat16"}


def test_the_reference_is_one_collective_and_one_product() -> None:
    kinds = {name: [n.kind for n in traced(name, CollectiveMode.REFERENCE, 4)] for name in FUNCTIONS}
    assert kinds == {
        "allgather_matmul": ["all_gather", "dot_general"],
        "matmul_reducescatter": ["dot_general", "reduce_scatter"],
    }


@RINGS
@NAMES
def test_the_compiler_keeps_every_hop(name: str, mode: CollectiveMode) -> None:
    chips, mesh = 4, make_mesh(MeshShape(4, 1, 1))
    config = CollectiveConfig(mode)
    sharded = jax.shard_map(
        lambda x, w: FUNCTIONS[name](x[0], w[0], "x", config)[None],
        mesh=mesh,
        in_specs=P(AXES),
        out_specs=P(AXES),
    )
    lowered = jax.jit(sharded).lower(
        jax.ShapeDtypeStruct((chips, BATCH, ROWS), jnp.float32),
        jax.ShapeDtypeStruct((chips, chips, ROWS, COLS), jnp.float32),
    )
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    hops = re.findall(r" = f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", text)
    assert len(hops) == sum(PROMISED[mode](chips, WIDTH[name]).values())


@pytest.fixture(scope="module")
def tpu_reports() -> list[dict]:
    """What the real TPU compiler makes of a loop of 8B layers in each mode, for v5e:4x4 and v4:2x2x4."""
    (found,) = reports_of("tests.collectives_on_tpu", timeout=600)
    return found


def of_mode(reports: list[dict], *modes: CollectiveMode) -> list[dict]:
    found = [report for report in reports if CollectiveMode(report["mode"]) in modes]
    assert found
    return found


def label(report: dict) -> tuple[str, ...]:
    return report["topology"], report["mesh"], report["mode"], report["weights"]


@pytest.mark.tpu_compiler
def test_the_tpu_schedule_puts_a_matmul_beside_every_hop(tpu_reports: list[dict]) -> None:
    for report in of_mode(tpu_reports, *PROMISED):
        assert len(report["hops"]) == (12 if report["mode"] == "throughput" else 6), label(report)
        covered = sum(hop["matmul_cycles"] > 0 for hop in report["hops"])
        assert covered >= 0.9 * len(report["hops"]), label(report)
        if report["mode"] != "throughput":
            assert covered == len(report["hops"]), label(report)


@pytest.mark.tpu_compiler
def test_no_tpu_program_copies_weights(tpu_reports: list[dict]) -> None:
    for report in tpu_reports:
        assert not report["copies"], (label(report), report["copies"])
        assert report["temp_bytes"] <= 0.01 * report["argument_bytes"], label(report)


@pytest.mark.tpu_compiler
def test_tpu_reductions_stay_reduce_scatters_in_float32(tpu_reports: list[dict]) -> None:
    for report in tpu_reports:
        kinds = {tuple(reduction) for reduction in report["reductions"]}
        whole_slice = report["mesh"] == "16,1,1"  # one axis over all chips: the compiler knows no better
        assert kinds == {("all-reduce" if whole_slice else "reduce-scatter", "f32")}, (label(report), kinds)
        summing = [hop for hop in report["hops"] if hop["elements"] in (64 * 2304, 64 * 1152)]
        assert {hop["dtype"] for hop in summing} <= {"f32"}, label(report)


# Thousands of estimated cycles for one layer without attention; see docs/collectives.md.
ESTIMATES = {
    ("v5e:4x4", "reference"): 92,
    ("v5e:4x4", "one_way"): 115,
    ("v5e:4x4", "throughput"): 125,
    ("v5e:4x4", "latency"): 112,
    ("v4:2x2x4", "reference"): 52,
    ("v4:2x2x4", "one_way"): 72,
    ("v4:2x2x4", "throughput"): 81,
    ("v4:2x2x4", "latency"): 70,
}


@pytest.mark.tpu_compiler
def test_estimated_cycles_do_not_grow(tpu_reports: list[dict]) -> None:
    for report in tpu_reports:
        if report["weights"] == "bfloat16" and report["mesh"] != "16,1,1":
            assert report["cycles"] <= 1.05e3 * ESTIMATES[report["topology"], report["mode"]], label(report)
