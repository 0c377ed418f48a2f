"""The command `check`: its flags and its help; no jax before they are understood.

A flag that names one value of a factor (--layout, --weights, …) narrows the check to it; without it every
value takes part.

Data flow: flags → `check_plan.check_plan` → `CheckPlan` → jax starts → `check_run.run` → exit code.

Worked example: `check --layout 1d --collectives latency` is a covering set of the other six factors.
"""

import dataclasses

from inference_engine.checking.cases import PREFIXES
from inference_engine.cli.check_plan import check_plan
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.mesh_flags import CUBE, mesh_group
from inference_engine.cli.model_flags import ACTIVATIONS, READER_OPTIONS, kv_cache_option, model_group
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.runtime import RuntimeOptions, runtime_group, start_jax
from layers.mesh_shape import host_devices_needed

_DESCRIPTION = (
    """Runs a model on a mesh in many settings and on one device, and compares all logits and tokens. By
    default the settings are a small set in which every pair of values occurs; --exhaustive runs every
    combination. A flag that names a layout, a dtype and so on narrows the check to it.""",
    """An error is max|mesh - one device| / max|one device| over all logits; tokens must be equal wherever
    the two best logits of one device are no tie. Rows go to stdout, progress to stderr; the exit code is 1
    when anything differs.""",
    """With --json stdout is one object: mesh, rows (the setting, max_rel_err, tokens_equal, ties, ok),
    illegal (what cannot run, with the reason) and ok.""",
)
_EXAMPLES = (
    ("the embedded model on eight chips", ""),
    ("another mesh, one layout", "--mesh 2,1,3 --layout 1d"),
    ("every combination in float32", "--exhaustive --weights float32 --activation_dtype float32"),
)
_MODEL_FLAGS = ("checkpoint", "weights", *(option.name for option in READER_OPTIONS))


def check_command() -> Command:
    """The command."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        plan = check_plan(flags)
        with phase("starting JAX", interrupts):
            start_jax(RuntimeOptions(flags["platform"], host_devices_needed(plan.shape)))
            from inference_engine.cli import check_run
        return check_run.run(plan, interrupts)

    return Command(
        name="check",
        summary="prove that every layout on a mesh gives one device's tokens",
        description=_DESCRIPTION,
        groups=(
            _model_group(),
            mesh_group(CUBE, every_value=True),
            Group(
                "What is checked",
                (
                    Option("exhaustive", "every legal combination, not a covering set", Kind.SWITCH),
                    Option("json", "one JSON object on stdout", Kind.SWITCH),
                ),
            ),
            runtime_group(),
        ),
        run=run,
        examples=_EXAMPLES,
    )


def _model_group() -> Group:
    """Those flags of `model_group` that a check has a use for, with dtypes as factors."""
    options = [option for option in model_group().options if option.name in _MODEL_FLAGS]
    every = [
        dataclasses.replace(option, shown_default="every one") if option.name == "weights" else option
        for option in options
    ]
    activations = Option(
        "activation_dtype", "dtype of activations", Kind.CHOICE, choices=ACTIVATIONS,
        shown_default="every one",
    )  # fmt: skip
    prefixes = Option(
        "prefixes", "whether prompts hold what they all begin with themselves or together", Kind.CHOICE,
        choices=PREFIXES, shown_default="every one",
    )  # fmt: skip
    return Group("Model", (*every, activations, kv_cache_option("every one"), prefixes))
