"""The command `score`: its flags and its help; no jax before they are understood.

Data flow: flags → `score_plan` → jax starts → `score_run.run` → exit code.

Worked example: `score --text ''` is refused before jax starts.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.mesh_flags import mesh_group
from inference_engine.cli.model_flags import engine_group, model_group
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.registries import Registries
from inference_engine.cli.runtime import runtime_group, runtime_options, start_jax
from inference_engine.cli.score_plan import score_plan
from inference_engine.config import EngineConfig

_DESCRIPTION = (
    """Says how well a model foretells a text: the natural log-probability of each token after all that
    stands before it, and bits per byte, the text's information under the model over its UTF-8 bytes. The text
    is read in the chunks that prefill uses, on one device or on a mesh.""",
    """A text of more tokens than --max_context is read through a window that slides by --stride tokens, and
    each token is scored once, in the first window that holds it: after at least context - stride tokens,
    those of the first window after all that stands before them. A smaller stride is closer to a model without
    limit and takes longer. Where the tokenizer has no mark of a text's beginning, the first token and its
    bytes are left out.""",
    """stdout has one line a token and one of totals; with --json one object: bytes, scored_tokens, logprob,
    bits_per_byte, perplexity, context, stride, windows, and tokens with token_id, token and logprob (null
    for a token that is left out).""",
)
_EXAMPLES = (
    ("a line and its tokens", "--text $'PROTEUS.\\nWelcome, my lord.\\n'"),
    ("a whole file, totals alone", "--file play.txt --summary"),
    ("the same on eight chips, for a program", "--file play.txt --json --mesh 2,2,2 --attn_all_to_all yzx"),
)


def score_command(registries: Registries) -> Command:
    """The command, with the defaults of these registries."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        plan = score_plan(flags, registries)
        with phase("starting JAX", interrupts):
            start_jax(runtime_options(flags, plan.mesh))
            from inference_engine.cli import score_run
        return score_run.run(plan, interrupts)

    return Command(
        name="score",
        summary="log-probabilities of a text's tokens, and bits per byte",
        description=_DESCRIPTION,
        groups=(
            Group(
                "Text",
                (
                    Option("text", "the text to score", metavar="TEXT"),
                    Option("file", "a file that holds it, in UTF-8", metavar="FILE"),
                    Option("stride", "tokens that the window of a long text slides by", Kind.INTEGER,
                           allowed="1 to the context - 1", shown_default="half of the context", metavar="N"),
                ),
            ),
            model_group(registries.pretrained),
            _engine_group(registries.engine),
            _mesh_group(),
            runtime_group(),
            Group(
                "Output",
                (
                    Option("summary", "totals alone, no tokens", Kind.SWITCH),
                    Option("json", "one JSON object", Kind.SWITCH),
                ),
            ),
        ),
        run=run,
        examples=_EXAMPLES,
    )  # fmt: skip


def _mesh_group() -> Group:
    """`mesh_group` with one layout: nothing is decoded."""
    group = mesh_group()
    of_one_step = ("prefill_layout", "decode_layout", "decode_context_parallel")
    options = [option for option in group.options if option.name not in of_one_step]
    words = {
        "layout": "where weights and activations lie",
        "context_parallel": "mesh axes that deal a text's positions, for ring attention",
    }
    return Group(group.title, _reworded(options, words))


def _engine_group(config: EngineConfig) -> Group:
    """`engine_group` in the words of scoring."""
    words = {
        "slots": "windows that are scored together",
        "max_context": "tokens of a window",
        "prefill_chunk": "tokens in one step",
    }
    group = engine_group(config)
    return Group(group.title, _reworded(group.options, words))


def _reworded(options: Sequence[Option], words: Mapping[str, str]) -> tuple[Option, ...]:
    """The same flags, with other words for some."""
    return tuple(dataclasses.replace(option, help=words.get(option.name, option.help)) for option in options)
