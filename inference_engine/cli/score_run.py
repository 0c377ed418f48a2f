"""Runs a plan of `score`: the part that needs jax.

Data flow: `ScorePlan` → model and tokenizer → ids → weights, compiled step → `TextScore` → lines or JSON.

Worked example: a text of 1,000 tokens at context 512 and stride 256 is three windows, which one batch of four
slots holds: the step is compiled for three rows.
"""

import dataclasses
import time

import jax

from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.mesh_flags import chunk_multiple
from inference_engine.cli.model import (
    OpenedModel,
    default_activation_dtype,
    lay_out,
    load_scorer,
    open_model,
    out_of_memory,
    report,
)
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.score_output import ScoreOutput
from inference_engine.cli.score_plan import ScorePlan
from inference_engine.cli.terminal import Output, note
from inference_engine.config import EngineConfig
from inference_engine.layout_choice import Layouts
from inference_engine.score_windows import windows
from inference_engine.scoring import Scorer
from inference_engine.text_score import TextScore, scored_bytes
from layers.errors import UserError


def run(plan: ScorePlan, interrupts: Interrupts) -> int:
    """Scores and prints; returns the exit code.

    Raises UserError before anything runs.
    """
    model = open_model(plan.model, plan.mesh)
    activations = default_activation_dtype(model.load.weights)
    config = plan.engine.resolve(model.hparams.max_positions, 0, activations, chunk_multiple(plan.mesh))
    config.check_model(model.hparams)
    stride = plan.stride_of(config.max_context)
    ids = _ids(plan, model)
    cuts = len(windows(len(ids), config.max_context, stride))
    rows = min(config.slots, cuts)
    config = dataclasses.replace(config, slots=rows, prefill_rows=rows)
    model = _laid_out(model, config)
    scorer = load_scorer(model, config, interrupts)
    score, seconds = _score(plan, model, scorer, ids, stride, interrupts)
    output = ScoreOutput(score, model.tokenizer, config.max_context, stride, cuts)
    Output().write((output.json if plan.json else output.text)(summary=plan.summary))
    note(_report(model, scorer, config, len(score.scored) / seconds), "", "dim")
    if score.unusable:
        note("error", f"the model's logits were not finite at {score.unusable} tokens", "bold red")
    return 1 if score.unusable else 0


def _laid_out(model: OpenedModel, config: EngineConfig) -> OpenedModel:
    """The model in its one layout, prefill's; says why where that was left open."""
    model = lay_out(model, config)
    if model.layouts is None:
        return model
    layouts = model.layouts
    for reason in layouts.reasons:
        if reason.startswith("prefill"):
            note("auto", reason, "dim")
    return dataclasses.replace(model, layouts=Layouts(layouts.prefill, layouts.prefill))


def _ids(plan: ScorePlan, model: OpenedModel) -> list[int]:
    """The text's tokens after the mark of a beginning, where there is one."""
    tokenizer = model.tokenizer
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*opening, *tokenizer.encode(plan.text)]
    if len(ids) < 2:
        raise UserError(
            f"{plan.name}: {len(ids) - len(opening)} tokens and no beginning-of-text token, so that nothing "
            "stands before anything; it needs at least two tokens"
        )
    return ids


def _score(
    plan: ScorePlan, model: OpenedModel, scorer: Scorer, ids: list[int], stride: int, interrupts: Interrupts
) -> tuple[TextScore, float]:
    """The score, and the seconds it took."""
    began = time.perf_counter()
    try:
        with phase("scoring", interrupts, Unit.WINDOWS) as update:
            logprobs = scorer.score(ids, stride, update)
    except jax.errors.JaxRuntimeError as error:
        raise out_of_memory(error, model, scorer.config) from None
    seconds = time.perf_counter() - began
    marked = model.tokenizer.bos_id is not None
    tokens = tuple(ids[1:] if marked else ids)
    values = (() if marked else (None,)) + tuple(float(value) for value in logprobs)
    return TextScore(tokens, values, scored_bytes(plan.text, tokens, model.tokenizer)), seconds


def _report(model: OpenedModel, scorer: Scorer, config: EngineConfig, rate: float) -> str:
    return report(model, scorer.params, config, scorer.cache_bytes, score_rate=rate).line()
