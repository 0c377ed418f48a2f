"""Laws of `profile --step`: every traced instruction counts once, for the part that its scope says."""

import dataclasses
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import run_serving
from checkpoints.synthetic import synthetic_state
from inference_engine.cli.step_profile_run import table
from inference_engine.profiling import step_profile
from inference_engine.profiling.measure import Weights, prepare
from inference_engine.profiling.settings import Method, Step
from inference_engine.profiling.step_parts import PARTS, SCOPES, Instruction, instructions, split
from layers.layout import AttnAllToAll, Layout
from tests.cli_runs import Run
from tests.sweep_rows import SETTING
from tests.tiny_checkpoint import TINY, save_tiny

PROGRAM = """
HloModule jit_step, is_scheduled=true

%region (a: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %a), metadata={op_name="reduce_sum"}
}
ENTRY %main {
  %p = f32[8,240]{1,0} parameter(0)
  %all-gather.3 = f32[8,240]{1,0:T(8,128)} all-gather(%p), channel_id=1, META(while/weights/all_gather)
  %a2a = (f32[1,2]{1,0}, /*index=1*/f32[1,2]{1,0}) all-to-all(%p, %p), META(attention/all_to_all)
  %send = (f32[8], f32[8]) collective-permute-start(%p), META(sampling/weights/ppermute)
  %fusion.7 = f32[8,240]{1,0} fusion(%p), kind=kLoop, calls=%region, META(attention/exp)
  %bitcast.1 = f32[240,8]{1,0} bitcast(%fusion.7)
  %dot.2 = f32[240,240]{1,0} dot(%p, %bitcast.1), lhs_contracting_dims={0}
  %while.2 = (f32[8,240]) while(%p), body=%region, META(weights/while)
  ROOT %copy = f32[8,240]{1,0} copy(%p)
}
"""
TEXT = re.sub(r"META\((.*)\)", r'metadata={op_name="jit(step)/\1" stack_frame_id=3}', PROGRAM)


def test_instructions_are_read_from_the_program() -> None:
    found = instructions(TEXT)
    assert {name: each.opcode for name, each in found.items()} == {
        "add.1": "add", "p": "parameter", "all-gather.3": "all-gather", "a2a": "all-to-all",
        "send": "collective-permute-start", "fusion.7": "fusion", "bitcast.1": "bitcast", "dot.2": "dot",
        "while.2": "while", "copy": "copy",
    }  # fmt: skip
    parts = {name: (each.part, each.scope) for name, each in found.items()}
    assert parts["all-gather.3"] == ("collectives", "weights")
    assert parts["a2a"] == ("collectives", "attention")
    assert parts["send"] == ("collectives", "weights")  # the innermost scope
    assert parts["fusion.7"] == ("attention", "attention")
    assert parts["dot.2"] == ("attention", "attention")  # has no path: of what it reads
    assert parts["copy"] == parts["add.1"] == ("other", "other")


def test_time_is_split_without_loss_and_loops_do_not_count_twice() -> None:
    traced = [
        ("fusion.7", 3.0),
        ("fusion.7", 1.0),
        ("all-gather.3", 8.0),
        ("while.2", 99.0),
        ("copy", 2.0),
        ("who", 5.0),
    ]
    made = split(instructions(TEXT), traced, runs=2)
    assert made.parts == {**dict.fromkeys(PARTS, 0.0), "attention": 2.0, "collectives": 4.0, "other": 1.0}
    assert made.collectives == {**dict.fromkeys((*SCOPES, "other"), 0.0), "weights": 4.0}
    assert made.total == 7.0
    assert [row["name"] for row in made.top] == ["all-gather.3", "fusion.7", "copy"]


@pytest.mark.parametrize(("layout", "step"), [
    (Layout.WEIGHT_STATIONARY_1D, Step.DECODE), (Layout.WEIGHT_STATIONARY_2D, Step.DECODE),
    (Layout.WEIGHT_GATHERED_XY, Step.PREFILL),
])  # fmt: skip
def test_every_layout_names_its_parts(layout: Layout, step: Step) -> None:
    """The programs that serve carry the scopes, whichever layout made them."""
    all_to_all = AttnAllToAll.AXIS_Z
    setting = dataclasses.replace(SETTING, layout=layout, step=step, attn_all_to_all=all_to_all)
    text = prepare(Weights(synthetic_state(TINY)), setting, Method(7, 1)).program.executable.as_text()
    found = list(instructions(text).values())
    wanted = {"weights", "attention", "residual"} | ({"sampling"} if step is Step.DECODE else set())
    assert {each.scope for each in found} >= wanted
    # Products, alone or as fusions of the CPU's library; those inside fusions are not traced.
    products = [each for each in found if "dot_general" in each.path or each.name.startswith("ynn_fusion")]
    assert {each.scope for each in products} == {"weights", "attention"}
    assert {each.scope for each in found if each.part == "collectives"} >= {"weights", "attention"}


@pytest.fixture
def profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    tiny = save_tiny(tmp_path)

    def run(*words: str) -> Run:
        code = run_serving.main(["profile", "--checkpoint", str(tiny), *words])
        return Run(code, *capsys.readouterr())

    return run


def test_a_traced_step_is_split_and_its_trace_opens(profile: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    words = ("--step", "decode", "--batch", "2", "--context", "16", "--rounds", "7", "--trace", str(folder))
    run = profile(*words, "--json")
    (value,) = run.rows
    assert run.code == 0
    assert set(value["parts"]) == set(PARTS)
    assert all(value["parts"][part] > 0 for part in ("weights", "attention", "collectives", "sampling"))
    assert sum(value["collectives_by_scope"].values()) == pytest.approx(value["parts"]["collectives"])
    assert 0 < sum(value["parts"].values()) < 100 * value["traced_seconds"]
    assert len(value["top"]) == 10
    assert value["timing"]["n"] == 7
    (perfetto,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any(event.get("args", {}).get("hlo_module") == "jit_generate_step" for event in events)
    (xplane,) = folder.rglob("*.xplane.pb")
    assert any("CPU" in plane.name for plane in jax.profiler.ProfileData.from_file(str(xplane)).planes)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            ("--step", "decode", "--axis", "2"),
            "--axis belongs to the collective matmuls, and --step is given",
        ),
        (("--mesh", "2,2,2"), "--mesh belongs to --step"),
        (("--step", "decode", "--batch", "1,2"), "--batch has 2 values; allowed with --step: one"),
        (("--step", "insert"), "allowed: decode, prefill"),
        (
            ("--step", "decode", "--layout", "gathered_x", "--attn_all_to_all", "yzx"),
            "trades heads that layout",
        ),
        (("--step", "decode", "--mesh", "5,1,1"), "embed=48 does not divide"),
        (("--step", "decode", "--context", "0"), "--context=0 is not allowed"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    profile: Callable[..., Run], words: tuple[str, ...], found: str
) -> None:
    run = profile(*words)
    assert (run.code, run.out) == (2, "")
    assert found in run.err


def test_a_trace_folder_that_cannot_be_written_is_refused(
    profile: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in profile("--step", "decode", "--trace", str(tmp_path / "file" / "x")).err


def made_profile() -> step_profile.StepProfile:
    traced = [("fusion.7", 3.0), ("all-gather.3", 8.0), ("a2a", 2.0)]
    timing = step_profile.Timing.of([1e-3] * 7)
    return step_profile.StepProfile(SETTING, timing, 2e-3, split(instructions(TEXT), traced, 1000), Path())


def test_the_table_has_every_part() -> None:
    text = table(made_profile())
    assert all(part in text for part in PARTS)
    assert "of attention" in text
    assert Instruction("x", "dot", "a/b").scope == "other"


@pytest.mark.plots
def test_a_step_has_a_figure(tmp_path: Path) -> None:
    from inference_engine.profiling.step_plot import plot_step

    assert plot_step(made_profile(), "tiny · a CPU", tmp_path).read_bytes().startswith(b"\x89PNG")
