"""Runs a plan of `check`: the part that needs jax.

Data flow: `CheckPlan` → opened state, mesh → legal cases → `Checker` → rows → table or JSON → exit code.

Worked example: an int8 checkpoint cannot be held as float32 or bfloat16: both are listed as illegal, and the
covering set is made of the rest.
"""

import dataclasses
import json
import time
from collections.abc import Sequence

from checkpoints.formats import open_checkpoint
from checkpoints.state import CheckpointState
from inference_engine.checking.cases import Factors, all_cases, covering_cases, illegal_settings
from inference_engine.checking.run import DECODE_STEPS, Checker, Row, padded_prompt
from inference_engine.cli.check_plan import CheckPlan
from inference_engine.cli.check_table import table
from inference_engine.cli.interrupts import Interrupts
from inference_engine.cli.model import default_checkpoint
from inference_engine.cli.progress import Unit, phase
from inference_engine.cli.terminal import Output, note
from inference_engine.config import AUTO
from layers.errors import UserError
from layers.mesh import make_mesh
from layers.partitioning import check_model

INT8 = "int8"
Illegal = tuple[str, str]
"""What cannot run, and why."""


@dataclasses.dataclass
class _Outcome:
    """What is done so far, and how to show it."""

    plan: CheckPlan
    total: int
    illegal: Sequence[Illegal]
    rows: list[Row] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def ok(self) -> bool:
        """Everything ran and nothing differs."""
        return len(self.rows) == self.total and all(row.ok for row in self.rows)

    def print(self) -> None:
        """The table or the object, on stdout."""
        Output().write(self._json() if self.plan.json else table(self.rows))

    def summary(self) -> str:
        """One line."""
        bad = sum(not row.ok for row in self.rows)
        exact = [row.max_rel_err for row in self.rows if _exact(row)]
        worst = f", float32 error at most {max(exact):.1e}" if exact else ""
        ties = sum(row.ties for row in self.rows)
        verdict = "all equal one device" if self.ok else f"{bad} differ"
        return (
            f"mesh {self.plan.shape}: {len(self.rows)} of {self.total} settings, {verdict}{worst}, "
            f"{ties} ties, {time.monotonic() - self.began:.0f} s"
        )

    def interrupted(self) -> str:
        """Prints what is done; returns what to say of it."""
        self.print()
        return self.summary()

    def _json(self) -> str:
        value = {
            "mesh": str(self.plan.shape),
            "rows": [row.to_json() for row in self.rows],
            "illegal": [{"setting": setting, "reason": reason} for setting, reason in self.illegal],
            "ok": self.ok,
        }
        return json.dumps(value, allow_nan=False) + "\n"


def _exact(row: Row) -> bool:
    case = row.case
    return (case.activation_dtype, case.reduce_dtype, case.kv_cache_dtype) == ("float32", "float32", AUTO)


def run(plan: CheckPlan, interrupts: Interrupts) -> int:
    """Checks and prints everything; returns the exit code.

    Raises UserError before anything runs.
    """
    path = plan.model.checkpoint or default_checkpoint()
    state = open_checkpoint(path, plan.model.reader).state
    check_model(state.hparams, plan.shape)
    longest = padded_prompt(max(Factors().prompt_tokens), plan.shape)
    steps = _steps(state.hparams.max_positions, longest)
    checker = Checker(state, plan.shape, make_mesh(plan.shape), longest, steps)
    factors, illegal = legal(state, plan.factors)
    illegal += illegal_settings(factors, plan.shape)
    cases = list(all_cases(factors, plan.shape)) if plan.exhaustive else covering_cases(factors, plan.shape)
    if not cases:
        raise UserError(f"nothing to check on mesh {plan.shape}: {illegal[0][0]}: {illegal[0][1]}")
    outcome = _Outcome(plan, len(cases), illegal)
    with (
        interrupts.closing(outcome.interrupted),
        phase(f"checking mesh {plan.shape}", interrupts, Unit.CASES) as update,
    ):
        update(0, len(cases))
        for row in checker.rows(cases):
            outcome.rows.append(row)
            update(len(outcome.rows), len(cases))
    outcome.print()
    for setting, reason in illegal:
        note("illegal", f"{setting}: {reason}", "yellow")
    note("" if outcome.ok else "failed", outcome.summary(), "dim" if outcome.ok else "bold red")
    return 0 if outcome.ok else 1


def _steps(max_positions: int | None, longest: int) -> int:
    """Decode steps that the model's positions have room for."""
    room = DECODE_STEPS if max_positions is None else max_positions - longest
    if room < 1:
        raise UserError(f"a model of {max_positions} positions has no room for the prompts of a check")
    return min(DECODE_STEPS, room)


def legal(state: CheckpointState, factors: Factors) -> tuple[Factors, list[Illegal]]:
    """The factors that this checkpoint allows, and those left out with the reason.

    Raises UserError if nothing is left.
    """
    if not state.quantized:
        return factors, []
    reason = "the checkpoint's kernels are int8, and rounding cannot be undone"
    illegal = [(f"weights {weights}", reason) for weights in factors.weights if weights != INT8]
    if INT8 not in factors.weights:
        raise UserError(f"{illegal[0][0]}: {reason}; nearest: --weights {INT8}")
    return dataclasses.replace(factors, weights=(INT8,)), illegal
