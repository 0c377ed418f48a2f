"""The command `generate`: its flags and its help; no jax before they are understood.

Idea: whatever can be refused is refused before anything heavy happens: flags and the prompts file before
jax starts, prompts that do not fit before a weight is read.

Data flow: flags → `plan_of` → jax starts → `generate_run.run` → exit code.

Worked example: `generate --temperature -1` is refused before jax starts.
"""

from inference_engine.cli.generate_plan import SHARED_PREFIX, plan_of
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.mesh_flags import mesh_group
from inference_engine.cli.model_flags import engine_group, model_group
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from inference_engine.cli.progress import phase
from inference_engine.cli.registries import Registries
from inference_engine.cli.runtime import runtime_group, runtime_options, start_jax
from inference_engine.cli.sampling_flags import sampling_group

_DESCRIPTION = (
    """Continues prompts with a model and prints prompt and text as it is generated. Several prompts and
    samples are generated together; they are printed one after the other in the order of the prompts, the
    first unfinished one live, the others when their turn comes.""",
    """The text goes to stdout; progress and a last line with the speed go to stderr. A text depends on its
    prompt, its sampling flags and the seed alone, not on what else is generated beside it. Nothing is cut
    silently: what does not fit is refused with the numbers.""",
    """With --shared_prefix or --share_prefixes the tokens that prompts begin with, and those of a prompt with
    several samples, are computed and held once; the texts are the same, slots take less memory.""",
    """A prompts file has an object a line, such as {"prompt": "KING.\\n", "seed": 3} or {"chat": "Who wrote
    Hamlet?", "system": "Be brief."}; beside the text it may set any sampling flag for itself, by the flag's
    name.""",
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
    (
        "samples and prompts that share what they begin with",
        "--shared_prefix $'ACT I.\\n\\n' --prompt $'FIRST LORD.\\n' --prompt $'CLOWN.\\n' --num_samples 2",
    ),
    ("prompts from a file, results for a program", "--prompts_file prompts.jsonl --json --logprobs 2"),
    (
        "ask a small instruction model, which is fetched once",
        "--model smollm2-135m --chat 'Who wrote Hamlet?'",
    ),
    ("the same text from eight chips", "--mesh 2,2,2 --layout 2d --attn_all_to_all yz"),
)


def generate_command(registries: Registries) -> Command:
    """The command, with the defaults of these registries."""

    def run(flags: Flags, interrupts: Interrupts) -> int:
        plan = plan_of(flags, registries)
        with phase("starting JAX", interrupts):
            start_jax(runtime_options(flags, plan.mesh))
            from inference_engine.cli import generate_run
        return generate_run.run(plan, interrupts)

    return Command(
        name="generate",
        summary="continue prompts and print the texts as they are generated",
        description=_DESCRIPTION,
        groups=(
            _prompts_group(registries.prompt),
            model_group(registries.pretrained),
            sampling_group(registries.sampling),
            engine_group(registries.engine),
            mesh_group(),
            runtime_group(),
            Group(
                "Output", (Option("json", "one JSON object a line for each prompt and sample", Kind.SWITCH),)
            ),
        ),
        run=run,
        examples=_EXAMPLES,
    )


def _prompts_group(default: str) -> Group:
    prompt = Option(
        "prompt", "text to continue", metavar="TEXT", repeatable=True, shown_default=repr(default)
    )
    file = Option("prompts_file", "JSONL file of prompts, after those of --prompt", metavar="FILE")
    chat = Option("chat", "a question to answer, in the model's chat form", metavar="TEXT", repeatable=True)
    system = Option("system", "what the chat's system message says", metavar="TEXT",
                    shown_default="the model's own")  # fmt: skip
    skip = Option("skip_bad_lines", "leave bad lines of the file out, naming each on stderr", Kind.SWITCH)
    prefix = Option(
        SHARED_PREFIX, "text before every prompt; computed and held once for all of them", metavar="TEXT"
    )
    share = Option("share_prefixes", "hold once what prompts, or the samples of one, begin with", Kind.SWITCH)
    return Group("Prompts", (prompt, chat, system, file, skip, prefix, share))
