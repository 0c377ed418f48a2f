"""What the flags of `sweep` and `profile` ask for, before jax starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.models import MODELS, palm_100m
from configs.sweeps import GRIDS
from inference_engine.cli.flags import parse
from inference_engine.cli.lists import choices_of, numbers_of
from inference_engine.cli.measured_model import EMBEDDED, described, open_state
from inference_engine.cli.options import Command, Flags
from inference_engine.cli.profile_command import profile_command
from inference_engine.cli.profile_plan import FORMS as FORM_NAMES
from inference_engine.cli.profile_plan import OPS, ProfilePlan, profile_plan
from inference_engine.cli.registries import Registries
from inference_engine.cli.step_plan import StepPlan, step_plan
from inference_engine.cli.sweep_command import sweep_command
from inference_engine.cli.sweep_plan import SweepPlan, sweep_plan
from inference_engine.config import EngineConfig
from inference_engine.profiling.collectives import FORMS, Op
from inference_engine.profiling.settings import Method, Step, config_hash
from inference_engine.sampling_params import SamplingParams
from layers.collectives.mode import CollectiveMode
from layers.errors import UserError
from layers.layout import Layout
from layers.mesh_shape import MeshShape
from tests.sweep_rows import SETTING
from tests.test_imports import HEAVY, run_python

REGISTRIES = Registries(MODELS, EngineConfig(), SamplingParams(), "", GRIDS)


def flags_of(command: Command, words: tuple[str, ...]) -> Flags:
    flags = parse(command, words)
    assert flags is not None
    return flags


def sweep_of(*words: str) -> SweepPlan:
    return sweep_plan(flags_of(sweep_command(REGISTRIES), words), REGISTRIES)


def profile_of(*words: str) -> ProfilePlan:
    return profile_plan(flags_of(profile_command(REGISTRIES), words), REGISTRIES)


def step_of(*words: str) -> StepPlan:
    return step_plan(flags_of(profile_command(REGISTRIES), words), REGISTRIES)


def test_the_names_of_forms_and_functions_are_those_that_run() -> None:
    assert tuple(form.value for form in FORMS) == FORM_NAMES
    assert tuple(op.value for op in Op) == OPS


def test_a_profile_compares_everything_by_default() -> None:
    plan = profile_of()
    assert (plan.op, plan.form) == (OPS, FORM_NAMES)
    assert (plan.axis, plan.batch, plan.weights) == ((8,), (8,), ("float32",))
    assert plan.model.name == EMBEDDED
    assert (plan.rows, plan.cols, plan.plot, plan.json) == (None, None, None, False)


def test_lists_are_lists() -> None:
    plan = profile_of("--axis", "2, 4,8", "--weights", "all", "--form", "latency,xla_tiled", "--json")
    assert plan.axis == (2, 4, 8)
    assert plan.weights == ("float32", "bfloat16", "int8")
    assert plan.form == ("latency", "xla_tiled")
    assert plan.json
    assert plan.host_devices == 8
    assert profile_of("--axis", "2,4096").host_devices == 64


@pytest.mark.parametrize(
    ("make", "words", "found"),
    [
        (profile_of, ("--rows", "8"), "--rows and --cols are the two sizes of one product"),
        (profile_of, ("--rows", "8", "--cols", "0"), "--cols=0 is not allowed; allowed: 1 and above"),
        (profile_of, ("--trace", "t"), "--trace belongs to --step"),
        (profile_of, ("--context", "9"), "--context belongs to --step"),
        (profile_of, ("--layers", "0"), "--layers=0 is not allowed"),
        (profile_of, ("--checkpoint", ""), "--checkpoint is empty"),
        (profile_of, ("--model", "palm_8b", "--checkpoint", "x"), "name two models"),
        (step_of, ("--step", "decode", "--layers", "2"), "--layers belongs to the collective matmuls"),
        (
            step_of,
            ("--step", "decode", "--weights", "all"),
            "--weights has 3 values; allowed with --step: one",
        ),
        (step_of, ("--step", "decode", "--mesh", "2,2"), "mesh '2,2' is not three positive integers"),
        (sweep_of, ("--held", "0"), "--held=0 is not allowed"),
        (sweep_of, ("--plot", ""), "--plot is empty"),
        (sweep_of, ("--reduce_dtype", "int8"), "allowed: float32, bfloat16, all"),
    ],
)
def test_what_makes_no_plan_is_refused(
    make: Callable[..., object], words: tuple[str, ...], found: str
) -> None:
    with pytest.raises(UserError) as caught:
        make(*words)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_has_one_setting() -> None:
    words = ("--mesh", "4,2,1", "--layout", "gathered_x", "--collectives", "latency", "--batch", "16")
    plan = step_of("--step", "prefill", *words, "--context", "64", "--trace", "t")
    setting = plan.setting
    assert (setting.step, setting.mesh, setting.layout) == (
        Step.PREFILL, MeshShape(4, 2, 1), Layout.WEIGHT_GATHERED_X,
    )  # fmt: skip
    assert (setting.collectives, setting.batch, setting.context) == (CollectiveMode.LATENCY, 16, 64)
    assert plan.trace == Path("t")


def test_a_sweep_takes_its_method_and_paths() -> None:
    words = (
        "--rounds",
        "9",
        "--steps",
        "2",
        "--out",
        "r.jsonl",
        "--chip",
        "c.json",
        "--seed",
        "5",
        "--retry_failed",
    )
    plan = sweep_of("--model", "palm_100m", *words)
    assert plan.method == Method(9, 2)
    assert (plan.out, plan.chip, plan.seed) == (Path("r.jsonl"), Path("c.json"), 5)
    assert plan.retry_failed
    assert plan.model.form == palm_100m()


def test_a_form_by_name_is_weights_of_chance_of_that_form() -> None:
    model = sweep_of("--model", "palm_100m").model
    state = open_state(model)
    assert state.hparams == palm_100m()
    said = described(model, state.hparams)
    assert (said["name"], said["parameters"], said["embed"]) == ("palm_100m", state.hparams.param_count, 768)
    assert described(sweep_of().model, state.hparams)["name"] == EMBEDDED


def test_the_hash_knows_every_factor_and_no_order() -> None:
    value = SETTING.to_json()
    assert config_hash(value) == config_hash(dict(reversed(value.items())))
    changed = [
        dataclasses.replace(SETTING, step=Step.PREFILL),
        dataclasses.replace(SETTING, mesh=MeshShape(4, 2, 1)),
        dataclasses.replace(SETTING, layout=Layout.WEIGHT_STATIONARY_1D),
        dataclasses.replace(SETTING, reduce_dtype="bfloat16"), dataclasses.replace(SETTING, weights="int8"),
        dataclasses.replace(SETTING, activation_dtype="bfloat16"), dataclasses.replace(SETTING, batch=3),
        dataclasses.replace(SETTING, context=17),
    ]  # fmt: skip
    hashes = {config_hash(setting.to_json()) for setting in [SETTING, *changed]}
    assert len(hashes) == len(changed) + 1


def test_values_of_lists_are_checked_one_by_one() -> None:
    assert choices_of("x", "all", ("a", "b")) == ("a", "b")
    assert choices_of("x", "b", ("a", "b")) == ("b",)
    with pytest.raises(UserError, match="--x=c is not known; allowed: a, b, all"):
        choices_of("x", "a,c", ("a", "b"))
    assert numbers_of("x", "1, 20") == (1, 20)
    for text in ("", "1,", "-1", "1.5", "²"):
        with pytest.raises(UserError, match="is not a list of integers from 1"):
            numbers_of("x", text)


def test_plans_are_made_without_jax() -> None:
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import run_serving
for words in (["sweep", "--batch", "x"], ["profile", "--axis", "x"], ["sweep", "compare", "a", "b"]):
    assert run_serving.main(words) == 2
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 3
