"""The flags that say which model is measured, and the model itself; jax only once it is opened.

Times depend on a model's form and not on its weights, so a form of configs/models.py with weights of chance
will do.

Data flow: flags → `MeasuredModel` → `open_state` → checkpoint state and what rows say of it.

Worked example: `--model palm_100m` is 102 million weights of chance; without it the embedded model is
measured.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.cli.flags import nearest, shown
from inference_engine.cli.options import Flags, Group, Option
from layers.errors import UserError
from layers.hparams import HParams

if TYPE_CHECKING:
    from checkpoints.state import CheckpointState

EMBEDDED = "default checkpoint"
Models = Mapping[str, Callable[[], HParams]]


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """A form by name with weights of chance, a checkpoint's path, or neither for the embedded one."""

    name: str = EMBEDDED
    form: HParams | None = None
    checkpoint: Path | None = None


def measured_group(models: Models) -> Group:
    """The flags."""
    model = Option("model", "a form of configs/models.py, with weights of chance", metavar="NAME",
                   allowed=", ".join(models), shown_default="the embedded Shakespeare model")  # fmt: skip
    checkpoint = Option("checkpoint", "folder or file to load instead", metavar="PATH")
    return Group("Model", (model, checkpoint))


def measured_model(flags: Flags, models: Models) -> MeasuredModel:
    """The model that the flags name; raises UserError for one that is not known, or two."""
    name, path = flags["model"], flags["checkpoint"]
    if name is not None and path is not None:
        raise UserError("--model and --checkpoint name two models; allowed: one of them")
    if path is not None:
        if not path:
            raise UserError("--checkpoint is empty; it needs a path")
        return MeasuredModel(Path(path).name, checkpoint=Path(path))
    if name is None:
        return MeasuredModel()
    if name not in models:
        raise UserError(
            f"--model={shown(name)} is not known; allowed: {', '.join(models)}{nearest(name, models)}"
        )
    return MeasuredModel(name, form=models[name]())


def open_state(model: MeasuredModel) -> "CheckpointState":
    """The weights, none of them read yet; raises UserError."""
    from checkpoints.formats import open_checkpoint
    from checkpoints.synthetic import synthetic_state
    from inference_engine.cli.model import default_checkpoint

    if model.form is not None:
        return synthetic_state(model.form)
    return open_checkpoint(model.checkpoint or default_checkpoint()).state


def described(model: MeasuredModel, hparams: HParams) -> dict[str, Any]:
    """What rows say of a model: its name and the sizes that times depend on."""
    sizes = ("layers", "embed", "ff", "heads", "kv_heads", "qkv", "vocab")
    return {
        "name": model.name,
        "parameters": hparams.param_count,
        "block": hparams.block.value,
        **{name: getattr(hparams, name) for name in sizes},
    }
