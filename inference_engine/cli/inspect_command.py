"""The command `inspect`: what a checkpoint is, before any weight is read.

Data flow: PATH → `open_checkpoint` (headers) → `inspection` → lines or one JSON object.

Worked example: `inspect model.gguf --chips 8 --memory_gib 16` lists ten meshes, each with about what a chip
holds and whether that fits.
"""

import json
from pathlib import Path

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.model_flags import READER_OPTIONS, WEIGHTS, reader_options
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.terminal import Output
from inference_engine.profiling.chips import CHIPS
from layers.errors import UserError

PATH = "PATH"
_DESCRIPTION = (
    """Says what a checkpoint is, from headers alone: family, parameters, dtypes, tokenizer, in what its form
    differs from PaLM, and for every mesh of --chips chips what is padded and about how many bytes a chip
    holds. What is not supported is refused by name, with exit code 2.""",
    """Where neither --chip nor --memory_gib is given it says of every known chip how many hold the model, in
    powers of two.""",
    """With --json stdout is one object: source, family, parameters, stored, form, differs_from_palm,
    tokenizer, cache_bytes_a_token, weights, layouts, meshes and, as above, fits_from.""",
)
_EXAMPLES = (
    ("the embedded model on eight chips", "checkpoints/default"),
    (
        "what fits into 16 GiB a chip",
        "tests/oracles/palm_pytorch_0.2.2.npz --memory_gib 16",
    ),
)


def inspect_command() -> Command:
    """The command."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        return _inspect(flags, interrupts)

    return Command(
        name="inspect",
        summary="say what a checkpoint is and what the engine would do with it",
        description=_DESCRIPTION,
        groups=(
            Group(
                "What for",
                (
                    Option("weights", "how kernels would be held", Kind.CHOICE, choices=WEIGHTS,
                           shown_default="bfloat16, or int8 where it is stored"),
                    Option("chips", "chips of the meshes that are listed", Kind.INTEGER, 8,
                           allowed="1 to 1024", metavar="N"),
                    Option("cache_tokens", "positions of the cache in all, for its size", Kind.INTEGER, 2048,
                           allowed="1 and above", metavar="N"),
                    Option("memory_gib", "memory of a chip, to say what fits", Kind.NUMBER,
                           allowed="above 0", metavar="GIB"),
                    Option("chip", "the same by a chip's name", Kind.CHOICE, choices=tuple(CHIPS),
                           shown_default="how many of each it takes"),
                    *READER_OPTIONS,
                ),
            ),
            Group("Output", (Option("json", "one JSON object on stdout", Kind.SWITCH),)),
        ),
        run=run,
        examples=_EXAMPLES,
        operands=(PATH,),
    )  # fmt: skip


def _inspect(flags: Flags, interrupts: Interrupts) -> int:
    for name, low, high in (("chips", 1, 1024), ("cache_tokens", 1, 1 << 40)):
        if not low <= flags[name] <= high:
            raise UserError(f"--{name}={flags[name]} is out of range; allowed: {low} to {high}")
    gib = flags["memory_gib"]
    if gib is not None and not 0 < gib < float("inf"):
        raise UserError(f"--memory_gib={gib} is no size; allowed: above 0")
    if gib is not None and flags["chip"] is not None:
        raise UserError("--memory_gib and --chip both say a chip's memory; allowed: one of them")
    with phase("opening the checkpoint", interrupts):
        from checkpoints.formats import open_checkpoint
        from checkpoints.load import WeightsDtype
        from inference_engine.inspection import device_memory, inspect_checkpoint, text_lines

        opened = open_checkpoint(Path(flags[PATH]), reader_options(flags))
        default = "int8" if opened.state.quantized else "bfloat16"
        weights = WeightsDtype(flags["weights"] or default)
        memory = None if gib is None else int(gib * (1 << 30))
        if flags["chip"] is not None:
            memory = device_memory(CHIPS[flags["chip"]])
        report = inspect_checkpoint(opened, weights, flags["chips"], flags["cache_tokens"], memory)
    lines = [json.dumps(report)] if flags["json"] else text_lines(report)
    Output().write("\n".join(lines) + "\n")
    return 0
