"""Runs a plan of `generate`: the part that needs jax.

Data flow: `GeneratePlan` → model and tokenizer → requests that fit → weights, compiled steps → texts in
order → one line of figures.

Worked example: a prompt of 130 tokens in a context of 512 leaves room for 382: the default of 128 new tokens
stands, `--max_new_tokens 400` is refused with these numbers.
"""

import contextlib
import dataclasses
import math
import os
import stat
import sys
from collections.abc import Iterator, Sequence

import jax

from inference_engine.chat_template import Message
from inference_engine.cli.generate_plan import GeneratePlan
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.mesh_flags import chunk_multiple
from inference_engine.cli.model import (
    OpenedModel,
    default_activation_dtype,
    lay_out,
    load_engine,
    open_model,
    out_of_memory,
    report,
)
from inference_engine.cli.model_flags import ModelOptions
from inference_engine.cli.output import InOrder, JsonPrinter, TextPrinter
from inference_engine.cli.progress import Unit, Update, phase
from inference_engine.cli.prompts import BadLine, Prompt, keep_good
from inference_engine.cli.report import RunReport
from inference_engine.cli.sampling_flags import renamed
from inference_engine.cli.terminal import Output, Stream, note
from inference_engine.config import EngineConfig
from inference_engine.generate import Generator
from inference_engine.request import Completion, FinishReason, Request, check_request
from inference_engine.sampling_params import SamplingParams
from inference_engine.sharing import SHORTEST, plan_sharing
from layers.errors import UserError

Fitted = tuple[Prompt, Request]


def run(plan: GeneratePlan, interrupts: Interrupts) -> int:
    """Generates and prints everything; returns the exit code.

    Raises UserError before anything is generated.
    """
    with phase(_opening(plan.model), interrupts):
        model = open_model(plan.model, plan.mesh)
    activations = default_activation_dtype(model.load.weights)
    config = plan.engine.resolve(
        model.hparams.max_positions, plan.top_logprobs, activations, chunk_multiple(plan.mesh)
    )
    config.check_model(model.hparams)
    model = lay_out(model, config)
    for reason in () if model.layouts is None else model.layouts.reasons:
        note("auto", reason, "dim")
    fitted = fit_all(plan, model, config)
    config = _shared(plan, fitted, config)
    generator = Generator(load_engine(model, config, interrupts), model.tokenizer)
    try:
        failed = _generate(generator, fitted, interrupts, json=plan.json)
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(error, model, config) from None
    if Stream.OUT.is_terminal and Stream.ERR.is_terminal:
        note("", "", "")  # a blank line between the text and the figures
    note(_report(generator, model).line(), "", "dim")
    for line in failed:
        note("error", line, "bold red")
    return 1 if failed else 0


def _shared(plan: GeneratePlan, fitted: Sequence[Fitted], config: EngineConfig) -> EngineConfig:
    """The engine's settings for what the prompts share, where that is asked for; says what it comes to."""
    if not plan.share:
        return config
    sharing = plan_sharing([request for _, request in fitted])
    sized = sharing.sized(config)
    texts = sum(request.params.num_samples for _, request in fitted)
    if sized is config:
        note(
            "sharing",
            f"{texts} texts begin with less than {SHORTEST} tokens in common; nothing is shared",
            "",
        )
    else:
        note(
            "sharing",
            f"{sharing.held_tokens} tokens held once for {texts} texts; a slot holds {sized.cache_time} "
            f"positions instead of {config.cache_time}",
            "dim",
        )
    return sized


def _opening(options: ModelOptions) -> str:
    """What may take long before a weight is read."""
    return "opening the model" if options.pretrained is None else f"getting {options.pretrained.name}"


def fit_all(plan: GeneratePlan, model: OpenedModel, config: EngineConfig) -> list[Fitted]:
    """Every prompt with its request; with `skip_bad_lines` without those that cannot run.

    Raises UserError: a prompt that does not fit, or none that does.
    """
    fitted: list[Fitted] = []
    bad: list[BadLine] = []
    for prompt in plan.found:
        if isinstance(prompt, BadLine):
            bad.append(prompt)
            continue
        try:
            fitted.append((prompt, fit(prompt, model, config)))
        except UserError as error:
            if not prompt.skippable:
                raise
            bad.append(BadLine(str(error)))
    if not plan.skip_bad_lines:
        keep_good(bad)
    for line in bad:
        note("skipped", line.reason, "bold yellow")
    if not fitted:
        raise UserError(f"all {len(bad)} lines are bad; nothing ran")
    return fitted


def fit(prompt: Prompt, model: OpenedModel, config: EngineConfig) -> Request:
    """The request of a prompt, which fits the engine whole.

    Raises UserError that starts with the prompt's name.
    """
    tokenizer, vocab = model.tokenizer, model.hparams.vocab
    ids = prompt_ids(prompt, model)
    params, room = prompt.params, config.max_context - len(ids)
    if not prompt.sized and room > 0:
        params = dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, room))
    try:
        params.validate_for(vocab)
        params = _only_spellable(params, tokenizer.vocab_size, vocab)
    except UserError as error:
        raise UserError(f"{prompt.name}: {renamed(error)}") from None
    request = Request(prompt.text, ids, params)
    check_request(request, config, vocab, prompt.name)
    return request


def prompt_ids(prompt: Prompt, model: OpenedModel) -> tuple[int, ...]:
    """The prompt's tokens, with one BOS before them where the tokenizer asks for it.

    Raises UserError that starts with the prompt's name: a question to a model without a chat template, or one
    that its template refuses.
    """
    tokenizer = model.tokenizer
    if prompt.chat is None:
        ids = tokenizer.encode(prompt.text)
    elif model.chat is None:
        raise UserError(f"{prompt.name}: the model has no chat template; allowed: --prompt")
    else:
        system = [] if prompt.chat.system is None else [Message("system", prompt.chat.system)]
        try:
            ids = tokenizer.encode_marked(model.chat.render([*system, Message("user", prompt.text)]))
        except UserError as error:
            raise UserError(f"{prompt.name}: {error}") from None
    if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]:
        return tuple(ids)
    return (tokenizer.bos_id, *ids)


def _only_spellable(params: SamplingParams, spelled: int, vocab: int) -> SamplingParams:
    """The parameters with the ids banned that the model has and the tokenizer does not."""
    if spelled >= vocab:
        return params
    beyond = [token for token in params.logit_bias if token >= spelled]
    if beyond:
        raise UserError(f"logit_bias token={beyond[0]} is not the tokenizer's; allowed: 0 to {spelled - 1}")
    bans = dict.fromkeys(range(spelled, vocab), -math.inf)
    return dataclasses.replace(params, logit_bias={**params.logit_bias, **bans})


def _generate(
    generator: Generator, fitted: Sequence[Fitted], interrupts: Interrupts, *, json: bool
) -> list[str]:
    """Prints every text; returns a line for each that the model could not finish."""
    prompts = [prompt for prompt, _ in fitted]
    output = Output()
    printer = JsonPrinter(prompts, output, generator.tokenizer) if json else TextPrinter(prompts, output)
    in_order = InOrder(prompts, printer)
    finished, total, failed = 0, sum(prompt.params.num_samples for prompt in prompts), []

    def close() -> str:
        in_order.interrupted()
        return f"{finished} of {total} texts finished, {generator.stats.decode_tokens:,} tokens generated"

    with interrupts.closing(close), _progress(interrupts) as update:
        for event in generator.run([request for _, request in fitted]):
            with interrupts.held():  # printed and counted, or neither
                in_order.take(event)
                if isinstance(event, Completion):
                    finished += 1
                    update(finished, total)
                    failed += _failure(prompts[event.index], event)
    return failed


def _failure(prompt: Prompt, completion: Completion) -> list[str]:
    if completion.finish_reason is not FinishReason.ERROR:
        return []
    count = completion.completion_tokens
    return [f"{prompt.name}: the model's logits were not finite after {count} tokens; its text ends there"]


@contextlib.contextmanager
def _progress(interrupts: Interrupts) -> Iterator[Update]:
    """Progress where stdout is a file; elsewhere the output shows it itself, or shares the screen."""
    if not _stdout_is_file():
        yield _unseen
        return
    with phase("generating", interrupts, Unit.SAMPLES) as update:
        yield update


def _unseen(done: int, total: int) -> None:
    del done, total


def _stdout_is_file() -> bool:
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _report(generator: Generator, model: OpenedModel) -> RunReport:
    engine, stats = generator.engine, generator.stats
    return report(
        model,
        engine.params,
        engine.config,
        engine.cache_bytes,
        prefill_rate=stats.prefill_rate,
        decode_rate=stats.decode_rate,
        step_milliseconds=stats.step_milliseconds,
        insert_bytes=model.insert_bytes(engine.config),
        insert_milliseconds=stats.insert_milliseconds,
    )
