"""Laws of `profile`: all forms compute the same, bytes follow from the sizes, and a fault is seen."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import run_serving
from configs.models import palm_8b
from inference_engine.cli.profile_run import _check_axis, layer_sizes, table
from inference_engine.profiling import collectives, place
from inference_engine.profiling.chips import ChipSpec
from inference_engine.profiling.collectives import FORMS, FormRow, Op, Problem, XlaForm, measure
from inference_engine.profiling.place import Place
from inference_engine.profiling.spread import Timing
from layers.collectives.mode import CollectiveMode
from layers.errors import UserError
from tests.cli_runs import Run

CHIP = ChipSpec("c", {"float32": 1e9, "bfloat16": 1e9}, memory_speed=1e9)
PLACE = Place("cpu", "a CPU", 8, CHIP, {"jax": "0"})
SMALL = Problem(Op.ALLGATHER_MATMUL, 4, 2, 16, 24, "float32", "float32", "float32", layers=2)
ROUNDS = 7


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize(("weights", "activations", "sums"), [
    ("float32", "float32", "float32"), ("int8", "float32", "float32"), ("bfloat16", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_every_form_computes_the_same(op: Op, weights: str, activations: str, sums: str) -> None:
    problem = dataclasses.replace(
        SMALL,
        op=op,
        weights=weights,
        activation_dtype=activations,
        reduce_dtype=sums,
        chips=3,
        rows=12,
        cols=18,
    )
    rows = measure(problem, FORMS, 2, PLACE)
    assert [row.form for row in rows] == [form.value for form in FORMS]
    assert all(row.ok for row in rows), {row.form: row.error for row in rows}
    assert all(row.timing.median > 0 and row.compile_seconds > 0 for row in rows)


def test_the_sum_over_layers_is_the_plain_product() -> None:
    arrays = collectives._Arrays.of(SMALL)
    expected = jnp.einsum("lbr,lrc->bc", arrays.x, arrays.w)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    for op in Op:
        problem = dataclasses.replace(SMALL, op=op)
        for form in (CollectiveMode.REFERENCE, XlaForm.PARTITIONER):
            found = collectives._program(problem, form, arrays, mesh).run()
            assert jnp.max(jnp.abs(found - expected)) < 1e-5 * jnp.max(jnp.abs(expected))


def test_a_wrong_form_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = collectives.allgather_matmul

    def wrong(x: jax.Array, w: jax.Array, *args: object, layer: jax.Array) -> jax.Array:
        config = args[1]
        off = 1 if config.mode is CollectiveMode.LATENCY else 0
        return real(x, jnp.roll(w, off, axis=1), *args, layer=layer)

    monkeypatch.setattr(collectives, "allgather_matmul", wrong)
    rows = measure(SMALL, FORMS, 2, PLACE)
    assert [row.form for row in rows if not row.ok] == ["latency"]


@pytest.mark.parametrize("chips", [1, 2, 4])
def test_bytes_and_bound_follow_from_the_sizes(chips: int) -> None:
    gather = dataclasses.replace(SMALL, chips=chips, activation_dtype="bfloat16")
    assert gather.sent_bytes == (chips - 1) * 2 * 16 // chips * 2
    scatter = dataclasses.replace(gather, op=Op.MATMUL_REDUCESCATTER)
    assert scatter.sent_bytes == (chips - 1) * 2 * 24 // chips * 4
    assert scatter.work.flops == 2 * 2 * 16 * 24 / chips
    assert scatter.work.memory_bytes == 16 * 24 / chips * 4


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="rows=16 does not divide over 3 chips; nearest: 2 chips"):
        dataclasses.replace(SMALL, chips=3)


def test_an_axis_of_more_chips_than_there_are_names_the_largest_legal_one() -> None:
    with pytest.raises(UserError, match=r"--axis=5000: there are 8 devices; nearest: --axis 6$"):
        _check_axis(5000, (18, 24))
    _check_axis(8, (18, 24))


def test_the_sizes_are_those_of_a_2d_layer() -> None:
    sizes = layer_sizes(palm_8b())
    assert sizes[Op.MATMUL_REDUCESCATTER] == (4096, 16 * 256 + 2 * 16384)
    assert sizes[Op.ALLGATHER_MATMUL] == (16 * 256 + 16384, 4096)


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    monkeypatch.setattr(place, "this_cpu", lambda name: CHIP)
    small = ("--rows", "16", "--cols", "24", "--layers", "1", "--rounds", str(ROUNDS), "--batch", "2")

    def run(*words: str) -> Run:
        code = run_serving.main(["profile", *small, *words])
        return Run(code, *capsys.readouterr())

    return run


def test_json_is_one_object_alone_on_stdout(profile: Callable[..., Run]) -> None:
    run = profile("--axis", "2,3", "--form", "reference,one_way", "--reduce_dtype", "all", "--json")
    (value,) = run.rows
    assert run.code == 0
    found = {(r["op"], r["chips"], r["reduce_dtype"], r["form"]) for r in value["rows"]}
    assert len(found) == len(value["rows"]) == 2 + 4
    assert {r["chips"] for r in value["rows"]} == {2}
    assert len(value["illegal"]) == 3
    assert all(r["timing"]["n"] == ROUNDS and r["bound_share"] > 0 for r in value["rows"])


def test_a_wide_error_is_exit_code_1(profile: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "tolerance", lambda *dtypes: -1.0)
    run = profile("--axis", "2", "--form", "reference", "--op", "allgather_matmul")
    assert run.code == 1
    assert "failed: reference of allgather_matmul on 2: error 0.0e+00" in run.err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--axis", "0"), "--axis=0 is not a list of integers from 1"),
        (("--form", "xla_tile"), "nearest: xla_tiled"),
        (("--axis", "3"), "does not divide over 3 chips"),
        (("--axis", "100", "--rows", "100", "--cols", "100"), "--rows is given 2 times"),
        (("--op", "allgather"), "nearest: allgather_matmul"),
        (("--model", "palm8b"), "nearest: palm_8b"),
    ],
)
def test_bad_flags_are_refused(profile: Callable[..., Run], words: tuple[str, ...], found: str) -> None:
    run = profile(*words)
    assert run.code == 2
    assert found in run.err


def test_the_table_names_every_form_the_fastest_first() -> None:

    rows = [
        FormRow(SMALL, form.value, Timing.of([1e-3 * (9 - i)] * 7), None, 1e-7, True, 0.1)
        for i, form in enumerate(FORMS)
    ]
    lines = table(rows).splitlines()
    assert [line.split()[7] for line in lines[1:]] == [form.value for form in reversed(FORMS)]


@pytest.mark.plots
def test_a_figure_for_each_function_and_batch(tmp_path: Path) -> None:
    from inference_engine.profiling.collective_plots import plot_collectives

    timing = Timing.of([1.0] * 7)
    rows = [
        FormRow(dataclasses.replace(SMALL, op=op, chips=n, batch=b), form.value, timing, None, 0.0, True, 1.0)
        for op in Op for n in (2, 4) for b in (1, 8) for form in FORMS
    ]  # fmt: skip
    assert len(plot_collectives(rows, PLACE, tmp_path)) == len(list(tmp_path.glob("*.png"))) == 4
