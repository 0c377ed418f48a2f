"""The collective matmuls compute the same two functions in every mode, on every ring.

Idea: the oracle is numpy on the global arrays, with the chips' places on the ring worked out by reshaping.
Integers below 2⁵³ make most comparisons exact: each shard, chunk and chip has numbers of its own, so that
one chunk in the wrong place changes the sum.

Data flow: numpy arrays [chips, ...] → shard_map over the whole mesh, one row a chip → every chip's result.

Worked example: mesh 2,4,1 and axis y: chips 0–3 are one ring and 4–7 another; chip 5 is place 1 of the
second, and its all-gather sees the x of chips 4, 5, 6, 7.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.collectives.matmuls import IMPLEMENTATIONS, allgather_matmul, matmul_reducescatter
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.collectives.products import Chunks, halves
from layers.collectives.reductions import all_reduce, reduce_scatter
from layers.mesh import make_mesh
from layers.mesh_shape import AXES, MeshShape

ALL_MODES = pytest.mark.parametrize("mode", CollectiveMode, ids=lambda mode: mode.value)
RING_SIZES = (1, 2, 3, 4, 5, 8)
FUNCTIONS = {"allgather_matmul": allgather_matmul, "matmul_reducescatter": matmul_reducescatter}
FLOAT32_ERROR = 1e-5

# Compile time is what these tests cost; nothing here depends on how good the code is.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}

Cases = dict[str, tuple[np.ndarray, np.ndarray, int | None]]


def rings(shape: MeshShape, axes: Sequence[str]) -> np.ndarray:
    """Chip numbers as [ring, place on it] for a ring over `axes`."""
    dims = [AXES.index(axis) for axis in axes]
    chips = np.arange(shape.size).reshape(shape.sizes)
    others = [dim for dim in range(len(AXES)) if dim not in dims]
    return chips.transpose(others + dims).reshape(-1, shape.over(axes))


def expected(name: str, x: np.ndarray, w: np.ndarray, ring_table: np.ndarray) -> np.ndarray:
    """Every chip's result in float64, from x [chips, ..., rows] and w [chips, chunks, rows, cols]."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    out = np.zeros((*x.shape[:-1], w.shape[-1]))
    for ring in ring_table:
        for place, chip in enumerate(ring):
            if name == "allgather_matmul":
                out[chip] = sum(x[other] @ w[chip, i] for i, other in enumerate(ring))
            else:
                out[chip] = sum(x[other] @ w[other, place] for other in ring)
    return out


def run(
    name: str, cases: Cases, shape: MeshShape, axes: str | tuple[str, ...], config: CollectiveConfig
) -> dict[str, np.ndarray]:
    """All cases in one program: every chip's results as [chips, ...]."""

    def chip(
        arrays: dict[str, tuple[jax.Array, jax.Array]], layers: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        results = {}
        for key, (x, w) in arrays.items():
            result = FUNCTIONS[name](x[0], w[0], axes, config, layer=layers.get(key))
            assert result.dtype == jnp.float32
            results[key] = result[None]
        return results

    sharded = jax.shard_map(
        chip, mesh=make_mesh(shape), in_specs=(P(AXES), P()), out_specs=P(AXES), check_vma=True
    )
    arrays = {key: (x, w) for key, (x, w, _) in cases.items()}
    layers = {key: np.int32(layer) for key, (_, _, layer) in cases.items() if layer is not None}
    return jax.tree.map(np.asarray, jax.jit(sharded, compiler_options=COMPILER_OPTIONS)(arrays, layers))


def error(result: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(result - reference)) / np.max(np.abs(reference)))


def coded(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Small integers that float32 multiplies and adds exactly."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def plain_cases(chips: int, rng: np.random.Generator) -> Cases:
    """Ranks 1 to 3 of x, odd and even widths, the narrowest, and a layer of a stack."""
    real = rng.standard_normal
    return {
        "vector": (real((chips, 6), np.float32), real((chips, chips, 6, 4), np.float32), None),
        "matrix": (real((chips, 3, 5), np.float32), real((chips, chips, 5, 7), np.float32), None),
        "narrow": (real((chips, 2, 1), np.float32), real((chips, chips, 1, 1), np.float32), None),
        "stacked": (real((chips, 2, 1, 6), np.float32), real((chips, 3, chips, 6, 5), np.float32), 1),
    }


def dtype_cases(chips: int, rng: np.random.Generator) -> Cases:
    """bfloat16 and int8 weights, and bfloat16 activations, with the first and the last layer of a stack."""
    x = rng.standard_normal((chips, 2, 6), np.float32)
    w = rng.standard_normal((chips, 3, chips, 6, 5), np.float32)
    return {
        "bfloat16 weights": (x, w.astype(jnp.bfloat16), 0),
        "bfloat16": (x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 2),
        "int8 weights": (x, rng.integers(-128, 128, w.shape, np.int8), 2),
    }


@ALL_MODES
@pytest.mark.parametrize("chips", RING_SIZES)
def test_every_mode_equals_the_sum_of_products(
    mode: CollectiveMode, chips: int, rng: np.random.Generator
) -> None:
    check_cases(mode, chips, plain_cases(chips, rng))


@ALL_MODES
@pytest.mark.parametrize("chips", [3, 4])
def test_a_weight_is_cast_chunk_by_chunk(mode: CollectiveMode, chips: int, rng: np.random.Generator) -> None:
    check_cases(mode, chips, dtype_cases(chips, rng))


def check_cases(mode: CollectiveMode, chips: int, cases: Cases) -> None:
    shape = MeshShape(chips, 1, 1)
    for name in FUNCTIONS:
        results = run(name, cases, shape, "x", CollectiveConfig(mode))
        for key, (x, w, layer) in cases.items():
            wanted = expected(name, x, w if layer is None else w[:, layer], rings(shape, "x"))
            assert error(results[key], wanted) <= FLOAT32_ERROR, (name, key)


MESHES_AND_AXES = [
    ("2,4,1", "y"),
    ("2,4,1", "x"),
    ("1,2,4", "z"),
    ("2,1,3", "z"),
    ("4,2,1", ("x", "y")),
    ("4,1,2", ("z", "x")),
    ("2,2,2", ("z", "y", "x")),
    ("1,3,2", ("y", "z")),
]


@ALL_MODES
@pytest.mark.parametrize(("mesh", "axes"), MESHES_AND_AXES, ids=str)
def test_every_chunk_is_the_one_of_its_chip(
    mode: CollectiveMode, mesh: str, axes: str | tuple[str, ...], rng: np.random.Generator
) -> None:
    shape = MeshShape.parse(mesh)
    names = (axes,) if isinstance(axes, str) else axes
    chunks = shape.over(names)
    x, w = coded((shape.size, 2, 3), rng), coded((shape.size, chunks, 3, 3), rng)
    for name in FUNCTIONS:
        result = run(name, {"only": (x, w, None)}, shape, axes, CollectiveConfig(mode))["only"]
        np.testing.assert_array_equal(result, expected(name, x, w, rings(shape, names)))


@ALL_MODES
def test_a_long_ring_rolled_up_gives_the_same(mode: CollectiveMode, rng: np.random.Generator) -> None:
    for chips in (7, 8):
        shape = MeshShape(1, chips, 1)
        x, w = coded((chips, 2, 3), rng), coded((chips, 2, chips, 3, 3), rng)
        for name in FUNCTIONS:
            rolled = run(name, {"only": (x, w, 1)}, shape, "y", CollectiveConfig(mode, max_unrolled=4))
            np.testing.assert_array_equal(rolled["only"], expected(name, x, w[:, 1], rings(shape, "y")))


@ALL_MODES
def test_sums_that_travel_in_bfloat16_are_rounded_at_hops_only(
    mode: CollectiveMode, rng: np.random.Generator
) -> None:
    chips, shape = 4, MeshShape(4, 1, 1)
    x = rng.standard_normal((chips, 8, 64), np.float32)
    w = rng.standard_normal((chips, chips, 64, 32), np.float32)
    config = CollectiveConfig(mode, "bfloat16")
    reduced = run("matmul_reducescatter", {"only": (x, w, None)}, shape, "x", config)["only"]
    found = error(reduced, expected("matmul_reducescatter", x, w, rings(shape, "x")))
    assert 1e-4 < found < chips * 2.0**-8
    gathered = run("allgather_matmul", {"only": (x, w, None)}, shape, "x", config)["only"]
    assert error(gathered, expected("allgather_matmul", x, w, rings(shape, "x"))) <= FLOAT32_ERROR


@pytest.mark.parametrize("width", [1, 2, 7, 128, 256, 384, 1152, 1280])
def test_halves_cover_a_width_and_keep_whole_lanes(width: int) -> None:
    first, second = halves(width)
    assert (first.start, first.stop, second.stop) == (0, second.start, width)
    assert 0 <= first.width - second.width <= 128
    if width % 128 == 0 and width > 128:
        assert first.width % 128 == 0


def test_every_mode_is_registered() -> None:
    assert set(IMPLEMENTATIONS) == set(CollectiveMode)


def call(name: str, x_spec: P, w_shape: tuple[int, ...], **options: object) -> None:
    """One function over axis x of 4,2,1 with x [8, 6]; the weight is the same on all chips."""
    mode = CollectiveConfig(CollectiveMode.ONE_WAY)
    sharded = jax.shard_map(
        lambda x, w: FUNCTIONS[name](x, w, "x", mode, layer=options.get("layer")),
        mesh=make_mesh(MeshShape(4, 2, 1)),
        in_specs=(x_spec, P()),
        out_specs=P(("x", "y")),
        check_vma=options.get("check_vma", True),
    )
    jax.eval_shape(sharded, jnp.ones((8, 6)), jnp.ones(w_shape))


def test_what_is_the_same_on_all_chips_is_not_summed() -> None:
    call("allgather_matmul", P("x"), (4, 6, 3))
    for name in FUNCTIONS:
        with pytest.raises(ValueError, match="nothing here varies over mesh axis x"):
            call(name, P("y"), (4, 6, 3))
        with pytest.raises(ValueError, match="check_vma=True"):
            call(name, P("x"), (4, 6, 3), check_vma=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_weight_that_does_not_fit_is_refused_with_both_shapes(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"\(3, 6, 3\) for a ring of 4 and x of width 6; .*\[..., 4, 6, cols\]"
    ):
        call(name, P("x"), (3, 6, 3))
    with pytest.raises(ValueError, match="layer=None"):
        call(name, P("x"), (2, 4, 6, 3))
    with pytest.raises(ValueError, match="layer=1"):
        call(name, P("x"), (4, 6, 3), layer=1)


def test_rows_that_are_not_the_width_of_x_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 5, 3\) for a ring of 4 and x of width 6"):
        Chunks(jnp.ones((4, 5, 3))).check(4, 6)


def test_an_unknown_reduce_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'float16' is not one of float32, bfloat16"):
        CollectiveConfig(reduce_dtype="float16")


def test_reductions_equal_the_sum_over_chips(rng: np.random.Generator) -> None:
    shape, axes = MeshShape(1, 4, 2), ("z", "y")
    x = coded((8, 3, 16), rng)

    def chip(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scattered = reduce_scatter(x, axes, "float32", dimension=2)
        return scattered, all_reduce(x, axes, "float32"), reduce_scatter(x, (), "float32", dimension=2)

    sharded = jax.shard_map(
        chip, mesh=make_mesh(shape), in_specs=P(AXES), out_specs=(P(AXES), P("x"), P(AXES))
    )
    scattered, whole, same = map(np.asarray, jax.jit(sharded)(x))
    for part, chip_number in enumerate(rings(shape, axes)[0]):
        np.testing.assert_array_equal(scattered[chip_number], x.sum(0)[:, 2 * part : 2 * part + 2])
    np.testing.assert_array_equal(whole, x.sum(0, keepdims=True))
    np.testing.assert_array_equal(same, x)
