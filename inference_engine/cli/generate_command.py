"""The command `generate`: its flags, and what they ask for; no jax before they are understood.

Idea: whatever can be refused is refused before anything heavy happens: flags and the prompts file before
jax starts, prompts that do not fit before a weight is read.

Data flow: flags → `GeneratePlan` → jax starts → `generate_run.run` → exit code.

Worked example: `generate --prompt A --prompt B --num_samples 2` is a plan of two prompts and four texts.
"""

import dataclasses
from pathlib import Path

from inference_engine.cli.model_flags import (
    EngineOptions,
    ModelOptions,
    engine_group,
    engine_options,
    model_group,
    model_options,
)
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.prompts import (
    BadLine,
    Prompt,
    keep_good,
    prompts_from_flags,
    read_prompts_file,
)
from inference_engine.cli.registries import Registries
from inference_engine.cli.runtime import runtime_group, runtime_options, start_jax
from inference_engine.cli.sampling_flags import fields_from_flags, sampling_group
from inference_engine.sampling_params import SamplingParams
from layers.errors import UserError

_DESCRIPTION = (
    """Continues prompts with a model and prints prompt and text as it is generated. Several prompts and
    samples are generated together; they are printed one after the other in the order of the prompts, the
    first unfinished one live, the others when their turn comes.""",
    """The text goes to stdout; progress and a last line with the speed go to stderr. A text depends on its
    prompt, its sampling flags and the seed alone, not on what else is generated beside it. Nothing is cut
    silently: what does not fit is refused with the numbers.""",
    """A prompts file has an object a line, such as {"prompt": "KING.\\n", "seed": 3}; beside the prompt it
    may set any sampling flag for itself, by the flag's name.""",
    """With --json stdout is one object a line for each prompt and sample, with index, sample, prompt, text,
    token_ids, finish_reason (stop, length or error), prompt_tokens, completion_tokens, and logprobs where
    asked for.""",
)
_EXAMPLES = (
    ("the embedded model with a prompt of its own", ""),
    (
        "two prompts; the shell writes a line break as $'\\n'",
        "--prompt $'KING HENRY.\\n' --prompt $'CLOWN.\\n'",
    ),
    ("three samples of at most 40 tokens", "--num_samples 3 --max_new_tokens 40 --seed 7"),
    ("prompts from a file, results for a program", "--prompts_file prompts.jsonl --json --logprobs 2"),
)


@dataclasses.dataclass(frozen=True)
class GeneratePlan:
    """What one call asks for.

    Attributes:
      found: prompts, and the lines that cannot run.
      skip_bad_lines: whether the others run without them.
      json: objects instead of text.
      model, engine: see `model_flags`.
    """

    found: tuple[Prompt | BadLine, ...]
    skip_bad_lines: bool
    json: bool
    model: ModelOptions
    engine: EngineOptions

    @property
    def top_logprobs(self) -> int:
        """Alternatives a token that the engine has to report."""
        params = [prompt.params for prompt in self.found if isinstance(prompt, Prompt)]
        return max((each.logprobs or 0 for each in params), default=0)


def generate_command(registries: Registries) -> Command:
    """The command, with the defaults of these registries."""

    def run(flags: Flags) -> int:
        plan = plan_of(flags, registries)
        with phase("starting JAX"):
            start_jax(runtime_options(flags))
            from inference_engine.cli import generate_run
        return generate_run.run(plan)

    return Command(
        name="generate",
        summary="continue prompts and print the texts as they are generated",
        description=_DESCRIPTION,
        groups=(
            _prompts_group(registries.prompt),
            model_group(),
            sampling_group(registries.sampling),
            engine_group(registries.engine),
            runtime_group(),
            Group(
                "Output", (Option("json", "one JSON object a line for each prompt and sample", Kind.SWITCH),)
            ),
        ),
        run=run,
        examples=_EXAMPLES,
    )


def plan_of(flags: Flags, registries: Registries) -> GeneratePlan:
    """What the flags ask for.

    Raises UserError: anything that is wrong with flags or prompts and needs no model to be seen.
    """
    typed = fields_from_flags(flags)
    fields = {**_fields(registries.sampling), **typed}
    sized = "max_new_tokens" in typed
    path = flags["prompts_file"]
    texts = flags["prompt"] or (() if path is not None else (registries.prompt,))
    found: list[Prompt | BadLine] = [*prompts_from_flags(texts, fields, sized)]
    if path is not None:
        found += read_prompts_file(Path(path), fields, sized, len(found))
    elif flags["skip_bad_lines"]:
        raise UserError("--skip_bad_lines is about a prompts file; nearest: --prompts_file FILE")
    if not flags["skip_bad_lines"]:
        found = [*keep_good(found)]
    _check_logprobs(found, json=flags["json"])
    return GeneratePlan(
        found=tuple(found),
        skip_bad_lines=flags["skip_bad_lines"],
        json=flags["json"],
        model=model_options(flags),
        engine=engine_options(flags, registries.engine),
    )


def _prompts_group(default: str) -> Group:
    prompt = Option(
        "prompt", "text to continue", metavar="TEXT", repeatable=True, shown_default=repr(default)
    )
    file = Option("prompts_file", "JSONL file of prompts, after those of --prompt", metavar="FILE")
    skip = Option("skip_bad_lines", "leave bad lines of the file out, naming each on stderr", Kind.SWITCH)
    return Group("Prompts", (prompt, file, skip))


def _fields(params: SamplingParams) -> dict[str, object]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _check_logprobs(found: list[Prompt | BadLine], *, json: bool) -> None:
    """Text has no place for log-probabilities, and they are not dropped silently."""
    asked = [prompt for prompt in found if isinstance(prompt, Prompt) and prompt.params.logprobs is not None]
    if asked and not json:
        raise UserError("--logprobs are part of JSON output; nearest: --logprobs with --json")
