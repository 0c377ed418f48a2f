"""What a call of `generate` asks for: its prompts and settings, understood before jax starts.

Data flow: flags → `plan_of` → `GeneratePlan` → `generate_run.run`.

Worked example: `--prompt A --prompt B --num_samples 2` is a plan of two prompts and four texts.
"""

import dataclasses
from pathlib import Path

from inference_engine.cli.mesh_flags import MeshOptions, decoding_mesh_options
from inference_engine.cli.model_flags import EngineOptions, ModelOptions, engine_options, model_options
from inference_engine.cli.options import Flags
from inference_engine.cli.prompts import (
    BadLine,
    Prompt,
    keep_good,
    prompts_from_flags,
    read_prompts_file,
)
from inference_engine.cli.registries import Registries
from inference_engine.cli.sampling_flags import fields_from_flags
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import text_from_bytes
from layers.errors import UserError

SHARED_PREFIX = "shared_prefix"


@dataclasses.dataclass(frozen=True)
class GeneratePlan:
    """What one call asks for.

    Attributes:
      found: prompts, and the lines that cannot run.
      skip_bad_lines: whether the others run without them.
      json: objects instead of text.
      share: whether what prompts have in common is held once.
      model, engine: see `model_flags`.
      mesh: None for one device.
    """

    found: tuple[Prompt | BadLine, ...]
    skip_bad_lines: bool
    json: bool
    model: ModelOptions
    engine: EngineOptions
    mesh: MeshOptions | None = None
    share: bool = False

    @property
    def top_logprobs(self) -> int:
        """Alternatives a token that the engine has to report."""
        params = [prompt.params for prompt in self.found if isinstance(prompt, Prompt)]
        return max((each.logprobs or 0 for each in params), default=0)


def plan_of(flags: Flags, registries: Registries) -> GeneratePlan:
    """What the flags ask for.

    Raises UserError: anything that is wrong with flags or prompts and needs no model to be seen.
    """
    typed = fields_from_flags(flags)
    fields = {**_fields(registries.sampling), **typed}
    sized = "max_new_tokens" in typed
    path = flags["prompts_file"]
    chats, system = flags["chat"], flags["system"]
    if system is not None and not chats:
        raise UserError("--system is about a chat; nearest: --chat TEXT")
    texts = flags["prompt"] or (() if path is not None or chats else (registries.prompt,))
    found: list[Prompt | BadLine] = [*prompts_from_flags(texts, fields, sized, chats, system)]
    if path is not None:
        found += read_prompts_file(Path(path), fields, sized, len(found))
    elif flags["skip_bad_lines"]:
        raise UserError("--skip_bad_lines is about a prompts file; nearest: --prompts_file FILE")
    if not flags["skip_bad_lines"]:
        found = [*keep_good(found)]
    prefix = _shared_prefix(flags[SHARED_PREFIX])
    found = [dataclasses.replace(p, text=prefix + p.text) if isinstance(p, Prompt) else p for p in found]
    _check_logprobs(found, json=flags["json"])
    return GeneratePlan(
        found=tuple(found),
        skip_bad_lines=flags["skip_bad_lines"],
        json=flags["json"],
        model=model_options(flags, registries.pretrained),
        engine=engine_options(flags, registries.engine),
        mesh=decoding_mesh_options(flags),
        share=flags["share_prefixes"] or bool(prefix),
    )


def _shared_prefix(text: str | None) -> str:
    """The text that stands before every prompt, empty for none; raises UserError for one that is no text."""
    if text is None:
        return ""
    if not text:
        raise UserError(f"--{SHARED_PREFIX} is empty; it needs at least one character")
    # Bytes of the command line that are no UTF-8 arrive as surrogates; this tells which byte it is.
    return text_from_bytes(text.encode("utf-8", "surrogateescape"), f"--{SHARED_PREFIX}")


def _fields(params: SamplingParams) -> dict[str, object]:
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def _check_logprobs(found: list[Prompt | BadLine], *, json: bool) -> None:
    """Text has no place for log-probabilities, and they are not dropped silently."""
    asked = [prompt for prompt in found if isinstance(prompt, Prompt) and prompt.params.logprobs is not None]
    if asked and not json:
        raise UserError("--logprobs are part of JSON output; nearest: --logprobs with --json")
