"""Runs of the command line in the test's own process, on a tiny checkpoint.

Compiling is most of a run's time, so runs with the same sizes share compiled programs.

Worked example: `Cli(path, capsys)("--prompt", "ab", "--json").rows[0]["prompt_tokens"]` is 3: BOS, a, b.
"""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import run_serving
from checkpoints.load import LoadOptions, load_params
from checkpoints.synthetic import synthetic_state
from inference_engine.cli import generate_run, model, progress
from inference_engine.cli.interrupts import Interrupts
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.tokenizer import ByteTokenizer
from layers.hparams import HParams

CONTEXT = 64
ROOM = ("--max_context", str(CONTEXT), "--prefill_chunk", "16")


@functools.cache
def compiled(hparams: HParams, load: LoadOptions, config: EngineConfig) -> Engine:
    """Programs for a form and sizes, with weights of their own."""
    state = synthetic_state(hparams)
    return model.load_engine(model.OpenedModel(state, ByteTokenizer(), load), config, Interrupts())


def shared_engine(opened: model.OpenedModel, config: EngineConfig, interrupts: Interrupts) -> Engine:
    """An engine with the opened weights and programs that other runs use too."""
    reporting = dataclasses.replace(config, top_logprobs=2)
    del interrupts
    engine = copy.copy(compiled(opened.hparams, opened.load, reporting))
    engine.params = load_params(opened.state, opened.load)
    return engine


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its JSON objects."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one line of a refused run."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err


class Cli:
    """Runs `generate` on the tiny checkpoint."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    def __call__(self, *words: str, path: Path | None = None, tokenizer: str | None = "bytes") -> Run:
        source = ["--checkpoint", str(path or self.path)]
        source += [] if tokenizer is None else ["--tokenizer", tokenizer]
        code = run_serving.main(["generate", *source, *ROOM, *words])
        return Run(code, *self.capsys.readouterr())


def share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all runs of a test share programs, and show no progress: its time is the machine's business."""
    monkeypatch.setattr(generate_run, "load_engine", shared_engine)
    monkeypatch.setattr(progress._Phase, "show", lambda self: None)
