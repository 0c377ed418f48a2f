"""The command `convert`: any checkpoint that opens, as a saved one (Orbax, neutral form).

Weights are read, quantized and written group by group, so that memory holds a few layers; the folder appears
whole or not at all, and an interrupted conversion goes on where it stopped.

Data flow: SOURCE → `open_checkpoint` → (`quantize_state`) → `save_checkpoint`, with the tokenizer and the
files that say its special tokens.

Worked example: `convert model.gguf model --weights int8` writes model.partial, then renames it to model.
"""

import json
import tempfile
from pathlib import Path

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.model_flags import READER_OPTIONS, reader_options
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.terminal import Output
from layers.errors import UserError

SOURCE, TARGET = "SOURCE", "TARGET"
INT8 = "int8"
GROUP_BYTES = 1 << 28
_DESCRIPTION = (
    """Writes a checkpoint of any kind as a saved checkpoint, which every mesh, layout and dtype loads. It
    takes the tokenizer along. Memory holds a few layers at a time. An interrupted conversion leaves a folder
    that does not load; the same command goes on from it.""",
    """With --weights int8 kernels are quantized as generate --weights int8 would, with equal results. Other
    dtypes are chosen at load: rounding before constants are folded in would round twice.""",
)
_EXAMPLES = (("a test file in int8", "tests/oracles/palm_pytorch_0.2.2.npz out --weights int8"),)


def convert_command() -> Command:
    """The command."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        return _convert(flags, interrupts)

    return Command(
        name="convert",
        summary="write a checkpoint of any kind as a saved one",
        description=_DESCRIPTION,
        groups=(
            Group(
                "How",
                (
                    Option("weights", "dtype of the kernels", Kind.CHOICE, choices=(INT8,),
                           shown_default="as stored"),
                    *READER_OPTIONS,
                    Option("overwrite", "replace the whole folder of a saved checkpoint", Kind.SWITCH),
                ),
            ),
        ),
        run=run,
        examples=_EXAMPLES,
        operands=(SOURCE, TARGET),
    )  # fmt: skip


def _convert(flags: Flags, interrupts: Interrupts) -> int:
    from checkpoints.formats import open_checkpoint
    from checkpoints.int8 import quantize_state
    from checkpoints.orbax_store import save_checkpoint

    source, target = Path(flags[SOURCE]), Path(flags[TARGET])
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"{target}: the target is the source or holds it; name another folder")
    opened = open_checkpoint(source, reader_options(flags))
    state = quantize_state(opened.state) if flags["weights"] == INT8 else opened.state
    with tempfile.TemporaryDirectory() as scratch, phase("converting", interrupts, Unit.BYTES) as update:
        tokenizer, companions = tokenizer_files(opened.tokenizer_file, Path(scratch))
        save_checkpoint(
            target, state, tokenizer, {"source": str(source)}, flags["overwrite"], GROUP_BYTES, companions,
            resume_as=_fingerprint(source, flags), progress=update,
        )  # fmt: skip
    Output().write(f"{target}: {opened.state.hparams.param_count:,} parameters\n")
    return 0


def tokenizer_files(tokenizer: Path | None, scratch: Path) -> tuple[Path | None, list[Path]]:
    """The tokenizer's file, and those beside it that say its special tokens and its chat template.

    Of a GGUF file only the metadata is kept, without weights, written into `scratch`.
    """
    from checkpoints.gguf_header import MAGIC, without_tensors
    from inference_engine.tokenizer_files import COMPANIONS

    if tokenizer is None:
        return None, []
    with tokenizer.open("rb") as stream:
        is_gguf = stream.read(len(MAGIC)) == MAGIC
    if is_gguf:
        bare = scratch / "tokenizer.gguf"
        bare.write_bytes(without_tensors(tokenizer))
        return bare, []
    beside = [tokenizer.parent / name for name in COMPANIONS]
    return tokenizer, [path for path in beside if path.is_file()]


def _fingerprint(source: Path, flags: Flags) -> str:
    """What is converted, as text: two conversions of one text write the same weights."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    seen = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return json.dumps([seen, flags["weights"], flags["gamma_offset"], flags["dim_head"], GROUP_BYTES])
