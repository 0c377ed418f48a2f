"""The command `profile`: its flags and its help; no jax before they are understood.

Data flow: flags → `profile_plan` or, with --step, `step_plan` → jax starts → `profile_run.run` or
`step_profile_run.run` → exit code.

Worked example: `profile --axis 2,4,8` compares six forms of two functions on three sizes of an axis;
`profile --step decode` says what a decode step spends its time on.
"""

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.measured_model import measured_group
from inference_engine.cli.mesh_flags import CUBE, MESH
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.profile_plan import CHOICES, profile_plan
from inference_engine.cli.progress import phase
from inference_engine.cli.registries import Registries
from inference_engine.cli.runtime import RuntimeOptions, runtime_group, start_jax
from inference_engine.cli.step_plan import step_plan
from inference_engine.cli.sweep_command import chip_option
from inference_engine.profiling.settings import Step
from inference_engine.profiling.spread import LEAST_ROUNDS
from layers.collectives.mode import CollectiveMode
from layers.layout import AttnAllToAll, Layout, ShardingConfig
from layers.mesh_shape import host_devices_needed

_DESCRIPTION = (
    """Runs the two collective matmuls in all modes of this project and in two of XLA's own forms, on one
    axis of chips, with the sizes of a model's layers or of your own. For each: time and its spread, the bytes
    that a chip has to send, the bound's share (FLOPs, memory, links), and the error against REFERENCE.""",
    """xla_tiled is a collective and a plain product inside shard_map; xla_partitioner is a plain product of
    sharded operands under jit, for which XLA chooses the collective. The forms are timed in turn, round after
    round. The exit code is 1 when an error exceeds the tolerance of its dtypes.""",
    """With --step one step of the engine is traced instead, on a mesh, and its time is split into weights
    (with what is fused to them), attention, collectives and sampling; --trace DIR keeps the trace, which
    xprof and Perfetto open.""",
)
_EXAMPLES = (
    ("all forms on 2, 4 and 8 host devices", "--axis 2,4,8 --plot plots"),
    ("what a decode step spends its time on", "--step decode --mesh 2,2,2 --batch 8 --trace trace"),
    ("a product of your own", "--rows 1024 --cols 4096 --activation_dtype bfloat16 --batch 64"),
)
_DEFAULTS = {
    "op": "all", "form": "all", "weights": "float32", "activation_dtype": "float32",
    "reduce_dtype": "float32",
}  # fmt: skip
_HELP = {
    "op": "functions", "form": "forms", "weights": "dtypes of the weights",
    "activation_dtype": "dtypes of the activations",
    "reduce_dtype": "dtypes of the partial sums that travel",
}  # fmt: skip


def profile_command(registries: Registries) -> Command:
    """The command, with the models of these registries."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        if flags["step"] is not None:
            step = step_plan(flags, registries)
            with phase("starting JAX", interrupts):
                start_jax(RuntimeOptions(flags["platform"], host_devices_needed(step.setting.mesh)))
                from inference_engine.cli import step_profile_run
            return step_profile_run.run(step, interrupts)
        plan = profile_plan(flags, registries)
        with phase("starting JAX", interrupts):
            start_jax(RuntimeOptions(flags["platform"], plan.host_devices))
            from inference_engine.cli import profile_run
        return profile_run.run(plan, interrupts)

    return Command(
        name="profile",
        summary="compare collective matmuls with XLA's own, or split a step's time into its parts",
        description=_DESCRIPTION,
        groups=(
            _common_group(),
            _collectives_group(),
            _step_group(),
            measured_group(registries.models),
            _output_group(),
            runtime_group(),
        ),
        run=run,
        examples=_EXAMPLES,
    )


def _common_group() -> Group:
    lists = [
        Option(name, _HELP[name], default=_DEFAULTS[name], metavar="A,B,…",
               allowed=", ".join((*CHOICES[name], "all")))
        for name in ("weights", "activation_dtype", "reduce_dtype")
    ]  # fmt: skip
    return Group(
        "What is measured (one value of each with --step)",
        (
            Option("batch", "texts, or rows of the activations", default="8", metavar="A,B,…"),
            *lists,
            Option("rounds", "times that each form is timed", Kind.INTEGER, 11, metavar="N",
                   allowed=f"{LEAST_ROUNDS} and above"),
            chip_option(),
        ),
    )  # fmt: skip


def _collectives_group() -> Group:
    lists = [
        Option(name, _HELP[name], default=_DEFAULTS[name], metavar="A,B,…",
               allowed=", ".join((*CHOICES[name], "all")))
        for name in ("op", "form")
    ]  # fmt: skip
    return Group(
        "Collective matmuls",
        (
            Option("axis", "chips on the axis", default="8", metavar="A,B,…"),
            *lists,
            Option("rows", "contracted size over all chips", Kind.INTEGER, metavar="N",
                   shown_default="the model's"),
            Option("cols", "columns of the result over all chips", Kind.INTEGER, metavar="N",
                   shown_default="the model's"),
            Option("layers", "products of one program, each with its own weights", Kind.INTEGER, 8,
                   allowed="1 and above", metavar="N"),
        ),
    )  # fmt: skip


def _step_group() -> Group:
    defaults = ShardingConfig()
    enums = {
        "layout": (Layout, defaults.layout, "where weights and activations lie"),
        "attn_all_to_all": (
            AttnAllToAll,
            defaults.attn_all_to_all,
            "mesh axes that attention splits the batch over",
        ),
        "collectives": (CollectiveMode, defaults.collectives.mode, "form of the collective matmuls"),
    }
    choices = [
        Option(name, words, Kind.CHOICE, default.value, choices=tuple(value.value for value in kind))
        for name, (kind, default, words) in enums.items()
    ]
    return Group(
        "A step",
        (
            Option("step", "split this step of the engine", Kind.CHOICE,
                   choices=tuple(value.value for value in Step)),
            Option(MESH, "chips along x, y and z", default=CUBE, metavar="X,Y,Z"),
            *choices,
            Option("context", "tokens in the cache when a decode step begins, or of a prompt", Kind.INTEGER,
                   128, allowed="1 and above", metavar="N"),
            Option("trace", "folder to keep the trace in", metavar="DIR", shown_default="not kept"),
        ),
    )  # fmt: skip


def _output_group() -> Group:
    return Group(
        "Output",
        (
            Option("plot", "folder for plots; needs the extra plots", metavar="DIR"),
            Option("json", "one JSON object on stdout", Kind.SWITCH),
        ),
    )
