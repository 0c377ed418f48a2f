"""What a call of `score` asks for: its text and settings, understood before jax starts.

Data flow: flags → `score_plan` → `ScorePlan` → `score_run.run`.

Worked example: `--file macbeth.txt --summary` is a plan of that file's text, one line of totals as output.
"""

import dataclasses
from pathlib import Path

from inference_engine.cli.files import read_file
from inference_engine.cli.mesh_flags import MeshOptions, mesh_options
from inference_engine.cli.model_flags import EngineOptions, ModelOptions, engine_options, model_options
from inference_engine.cli.options import Flags
from inference_engine.cli.registries import Registries
from inference_engine.score_windows import check_stride
from inference_engine.tokenizer import text_from_bytes
from layers.errors import UserError


@dataclasses.dataclass(frozen=True)
class ScorePlan:
    """What one call asks for.

    Attributes:
      name: how messages call the text.
      stride: tokens that the window of a long text slides by; None for half of the context.
      summary: totals alone.
      json: an object instead of lines.
      model, engine: see `model_flags`; the engine's slots are windows that are scored together.
      mesh: None for one device.
    """

    name: str
    text: str
    stride: int | None
    summary: bool
    json: bool
    model: ModelOptions
    engine: EngineOptions
    mesh: MeshOptions | None = None

    def stride_of(self, context: int) -> int:
        """The stride for a context; raises UserError for one that is none."""
        stride = max(1, context // 2) if self.stride is None else self.stride
        try:
            check_stride(stride, context)
        except UserError as error:
            raise UserError(f"--{error}") from None
        return stride


def score_plan(flags: Flags, registries: Registries) -> ScorePlan:
    """What the flags ask for.

    Raises UserError: no text or two, or whatever is wrong with the flags and needs no model to be seen.
    """
    name, text = _text(flags["text"], flags["file"])
    if not text:
        raise UserError(f"{name} is empty; it needs at least one character")
    return ScorePlan(
        name=name,
        text=text,
        stride=flags["stride"],
        summary=flags["summary"],
        json=flags["json"],
        model=model_options(flags, registries.pretrained),
        engine=engine_options(flags, registries.engine),
        mesh=_mesh(flags),
    )


def _mesh(flags: Flags) -> MeshOptions | None:
    """The mesh with prefill's layout, in which texts are scored."""
    left_out = ("prefill_layout", "decode_layout", "decode_context_parallel")
    known = dict.fromkeys(left_out) | dict(flags.values)
    mesh = mesh_options(Flags(known, flags.given))
    if mesh is None:
        return None
    return dataclasses.replace(mesh, layouts=dataclasses.replace(mesh.layouts, decodes=False))


def _text(text: str | None, file: str | None) -> tuple[str, str]:
    """The text and its name."""
    if (text is None) == (file is None):
        found = "neither --text nor --file is" if text is None else "--text and --file are both"
        raise UserError(f"{found} given; allowed: one text, as --text TEXT or --file FILE")
    if file is not None:
        return file, text_from_bytes(read_file(Path(file), "a text file"), file)
    # Bytes of the command line that are no UTF-8 arrive as surrogates; this tells which byte it is.
    return "the text", text_from_bytes((text or "").encode("utf-8", "surrogateescape"), "the text")
