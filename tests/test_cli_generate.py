"""The command `generate` from words to output, in one process.

Compiling is most of a run's time, so runs with the same sizes share an engine here; what a user starts is in
test_cli_process.py.

Worked example: `generate --checkpoint TINY --tokenizer bytes --prompt ab --json` prints one object whose
prompt has 3 tokens: BOS, a, b.
"""

import copy
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import run_serving
from checkpoints.int8 import quantize_state
from checkpoints.load import LoadOptions, WeightsDtype, load_params
from checkpoints.orbax_store import save_checkpoint
from checkpoints.state import CheckpointState
from checkpoints.synthetic import synthetic_state
from inference_engine.cli import generate_run, model, progress
from inference_engine.cli.model_flags import LayersForm, ModelOptions
from inference_engine.cli.prompts import Prompt
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.generate import Generator, TextPiece
from inference_engine.request import Completion, Request
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import ByteTokenizer
from layers.errors import UserError
from layers.hparams import HParams
from tests.tiny_checkpoint import TINY, save_tiny

CONTEXT = 64
ROOM = ("--max_context", str(CONTEXT), "--prefill_chunk", "16")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("checkpoints"))


@functools.cache
def compiled(hparams: HParams, load: LoadOptions, config: EngineConfig) -> Engine:
    """Programs for a form and sizes, with weights of their own."""
    state = synthetic_state(hparams)
    return model.load_engine(model.OpenedModel(state, ByteTokenizer(), load), config)


def shared_engine(opened: model.OpenedModel, config: EngineConfig) -> Engine:
    """An engine with the opened weights and programs that other runs use too."""
    reporting = dataclasses.replace(config, top_logprobs=2)
    engine = copy.copy(compiled(opened.hparams, opened.load, reporting))
    engine.params = load_params(opened.state, opened.load)
    return engine


@pytest.fixture(autouse=True)
def _share_and_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_run, "load_engine", shared_engine)
    # How long a phase takes is the machine's business.
    monkeypatch.setattr(progress._Phase, "show", lambda self: None)


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


@pytest.fixture
def cli(tiny: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tiny, capsys)


def test_text_follows_its_prompt_and_the_last_line_tells_the_speed(cli: Cli) -> None:
    run = cli("--prompt", "né\n", "--max_new_tokens", "8")
    (row,) = cli("--prompt", "né\n", "--max_new_tokens", "8", "--json").rows
    assert run.code == 0
    assert run.out == "né\n" + row["text"] + ("" if row["text"].endswith("\n") else "\n")
    assert run.err.startswith("cpu ×1 · ")
    assert run.err.count("\n") == 1
    for part in ("parameters, float32", "prefill ", "decode ", " ms/token", "weights ", "cache "):
        assert part in run.err


def test_json_says_all_of_a_text(cli: Cli) -> None:
    run = cli("--prompt", "ab", "--max_new_tokens", "5", "--json")
    (row,) = run.rows
    assert list(row) == [
        "index", "sample", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens",
        "completion_tokens",
    ]  # fmt: skip
    assert (row["prompt"], row["prompt_tokens"], row["completion_tokens"]) == ("ab", 3, 5)
    assert row["finish_reason"] == "length"
    assert len(row["token_ids"]) == 5


def test_the_same_words_give_the_same_text_and_another_seed_another(cli: Cli) -> None:
    words = ("--prompt", "ab", "--max_new_tokens", "12", "--json", "--seed")
    assert cli(*words, "1").out == cli(*words, "1").out
    assert cli(*words, "1").rows[0]["token_ids"] != cli(*words, "2").rows[0]["token_ids"]


def test_generation_ignores_what_is_generated_beside_it(cli: Cli) -> None:
    words = ("--max_new_tokens", "10", "--json", "--seed", "3")
    prompts = ["a", "the second prompt, which is longer", "c" * 17]
    together = cli(*words, *itertools.chain(*(("--prompt", text) for text in prompts))).rows
    alone = [cli(*words, "--prompt", text).rows[0] for text in prompts]
    assert [row["token_ids"] for row in together] == [row["token_ids"] for row in alone]
    assert [row["index"] for row in together] == [0, 1, 2]


def test_samples_of_one_prompt_differ(cli: Cli) -> None:
    run = cli("--prompt", "ab", "--num_samples", "6", "--max_new_tokens", "9", "--temperature", "1", "--json")
    assert [row["sample"] for row in run.rows] == list(range(6))
    assert len({tuple(row["token_ids"]) for row in run.rows}) == 6


def test_several_texts_stand_under_headers(cli: Cli) -> None:
    words = ("--prompt", "A:\n", "--prompt", "B:\n", "--num_samples", "2", "--max_new_tokens", "4")
    run, rows = cli(*words), cli(*words, "--json").rows
    expected = []
    for row in rows:
        header = f"--- prompt {row['index'] + 1} of 2, sample {row['sample'] + 1} of 2 ---"
        text = row["prompt"] + row["text"]
        expected.append(f"{header}\n{text}" + ("" if text.endswith("\n") else "\n"))
    assert run.out == "\n".join(expected)


def test_every_sampling_flag_reaches_the_model(cli: Cli) -> None:
    base = ("--prompt", "ab", "--max_new_tokens", "40", "--json", "--seed", "4", "--temperature")
    plain = cli(*base, "0.5").rows[0]["token_ids"]
    greedy = cli(*base, "0").rows[0]["token_ids"]
    assert plain != greedy
    for words in (("--top_k", "1"), ("--top_p", "1e-6"), ("--min_p", "1")):
        assert cli(*base, "0.5", *words).rows[0]["token_ids"] == greedy, words
    assert plain[0] not in cli(*base, "0.5", "--logit_bias", f"{plain[0]}=-inf").rows[0]["token_ids"]
    often = (*base, "0.5", "--logit_bias", "65=4")  # an A that comes often is penalised often
    repeated = cli(*often).rows[0]["token_ids"]
    for name, value in (("repetition", "100"), ("presence", "2"), ("frequency", "2")):
        assert cli(*often, f"--{name}_penalty", value).rows[0]["token_ids"] != repeated, name
    assert cli(*base, "0.5", "--logit_bias", "65=1000").rows[0]["text"] == "A" * 40


def test_stops_end_a_text(cli: Cli) -> None:
    base = ("--prompt", "ab", "--json", "--logit_bias", "65=1000", "--max_new_tokens", "9")
    (row,) = cli(*base, "--stop", "x", "--stop", "AAA").rows
    assert (row["text"], row["finish_reason"], row["completion_tokens"]) == ("", "stop", 3)
    (row,) = cli(*base, "--stop_id", "1", "--stop_id", "65").rows
    assert (row["text"], row["finish_reason"], row["token_ids"]) == ("", "stop", [65])


def test_log_probabilities_are_those_of_the_tokens(cli: Cli) -> None:
    words = ("--prompt", "ab", "--max_new_tokens", "6", "--json", "--temperature", "0")
    (row,) = cli(*words, "--logprobs", "2").rows
    assert row["token_ids"] == cli(*words).rows[0]["token_ids"]
    assert [entry["token_id"] for entry in row["logprobs"]] == row["token_ids"]
    for entry in row["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy takes the most likely one
        assert math.isclose(entry["top"][0]["logprob"], entry["logprob"], abs_tol=1e-5)
        assert entry["top"][1]["logprob"] <= entry["logprob"] <= 0
    (row,) = cli(*words, "--logprobs", "0").rows
    assert [entry["top"] for entry in row["logprobs"]] == [[]] * 6


def test_a_file_of_prompts_overrides_line_by_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "max_new_tokens": 2}\n\n{"prompt": "b", "seed": 5}\n{"prompt": "c"}\n')
    flags = (
        "--prompts_file",
        str(path),
        "--prompt",
        "first",
        "--max_new_tokens",
        "4",
        "--json",
        "--seed",
        "1",
    )
    rows = cli(*flags).rows
    assert [row["prompt"] for row in rows] == ["first", "a", "b", "c"]
    assert [row["completion_tokens"] for row in rows] == [4, 2, 4, 4]
    alone = cli("--prompt", "b", "--max_new_tokens", "4", "--json", "--seed", "5").rows[0]
    assert rows[2]["token_ids"] == alone["token_ids"]


def test_one_bad_line_stops_all_unless_it_is_skipped(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    long = "x" * CONTEXT
    path.write_text(
        f'{{"prompt": "a"}}\n{{"prompt": 3}}\n{{"prompt": "{long}"}}\n{{"prompt": "b", "top_p": 3}}\n'
    )
    words = ("--prompts_file", str(path), "--max_new_tokens", "2", "--json")
    assert 'p.jsonl line 2: "prompt" is a number' in cli(*words).error
    run = cli(*words, "--skip_bad_lines")
    assert run.code == 0
    assert [(row["index"], row["prompt"]) for row in run.rows] == [(0, "a")]
    skipped = [line for line in run.err.splitlines() if line.startswith("skipped: ")]
    assert [line.partition("line ")[2][:2] for line in skipped] == ["2:", "4:", "3:"] or [
        line.partition("line ")[2][:2] for line in skipped
    ] == ["2:", "3:", "4:"]
    path.write_text("[]\n")
    assert "all 1 lines are bad" in cli(*words, "--skip_bad_lines").err
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "{long}"}}\n')
    assert "line 2: the prompt has 65 tokens; allowed: at most 63" in cli(*words).error


def test_a_default_length_shrinks_to_the_room_and_an_asked_one_is_refused(cli: Cli) -> None:
    prompt = "x" * (CONTEXT - 4)  # BOS and 60 characters leave room for three
    (row,) = cli("--prompt", prompt, "--json", "--logit_bias", "257=-inf").rows
    assert (row["prompt_tokens"], row["completion_tokens"], row["finish_reason"]) == (61, 3, "length")
    error = cli("--prompt", prompt, "--max_new_tokens", "4").error
    assert (
        "61 prompt tokens and max_new_tokens=4 exceed the context of 64; nearest: max_new_tokens=3" in error
    )


REFUSED = [
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "a", "--prompt", ""], "prompt 2 is empty"),
    (["--prompt", "x" * 64], "the prompt has 65 tokens; allowed: at most 63"),
    (["--prompt", "a\udcff"], "not UTF-8: byte 0xFF at position 1"),
    (
        ["--temperature", "-1"],
        "--temperature=-1.0 is not allowed; allowed: 0 (greedy) or 1e-06 to 1e+06; nearest: 0",
    ),
    (["--temperature", "nan"], "--temperature=nan is not allowed"),
    (["--top_p", "3"], "--top_p=3.0 is not allowed"),
    (["--top_k", "0"], "--top_k=0 is not allowed"),
    (["--top_k", "259"], "top_k=259 is not allowed; allowed: at most the vocabulary, 258"),
    (["--logit_bias", "258=1"], "logit_bias token=258 is not allowed"),
    (["--stop_id", "258"], "stop_id token=258 is not allowed"),
    (["--stop", ""], "--stop[0]=''"),
    (["--num_samples", "2", "--temperature", "0"], "--num_samples=2"),
    (["--max_new_tokens", "0"], "--max_new_tokens=0"),
    (["--slots", "0"], "--slots=0 is not allowed"),
    (["--logprobs", "2"], "--logprobs with --json"),
    (["--skip_bad_lines"], "nearest: --prompts_file"),
    (["--weights", "fp16"], "allowed: float32, bfloat16, int8"),
    (["--gamma_offset", "1"], "drop gamma_offset"),
    (["--seed", "1", "--seed", "2"], "--seed is given 2 times"),
    (["--promt", "a"], "nearest: --prompt"),
    (["a prompt"], "nearest: --prompt 'a prompt'"),
    (["--prompts_file", "no_such_file.jsonl"], "no such file"),
    (["--platform", "quantum"], "allowed: auto, cpu, gpu, tpu"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED, ids=[" ".join(words)[:30] for words, _ in REFUSED])
def test_bad_input_is_one_line(cli: Cli, words: Sequence[str], part: str) -> None:
    assert part in cli(*words).error


def broken_checkpoints(folder: Path) -> Iterator[tuple[Path, str]]:
    (folder / "empty").mkdir()
    yield folder / "empty", "an empty folder"
    (folder / "empty.npz").touch()
    yield folder / "empty.npz", "an empty file"
    (folder / "photo.npz").write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    yield folder / "photo.npz", "a JPEG image"
    whole = save_tiny(folder)
    (whole / "checkpoint.json").write_text((whole / "checkpoint.json").read_text()[:100])
    yield whole, "truncated or not JSON"
    yield folder / "tinny", "no such file or folder; there is"
    np.savez(folder / "half.npz", **{"w::x": np.zeros(100, np.float32)})
    (folder / "cut.npz").write_bytes((folder / "half.npz").read_bytes()[:200])
    yield folder / "cut.npz", "truncated"


def test_a_checkpoint_that_cannot_be_read_is_one_line(cli: Cli, tmp_path: Path) -> None:
    for path, part in broken_checkpoints(tmp_path):
        assert part in cli(path=path).error


def test_weights_that_are_damaged_inside_are_one_line(cli: Cli, tmp_path: Path) -> None:
    path = save_tiny(tmp_path)
    for file in (path / "weights_0").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-500])
    assert "cannot be read" in cli(path=path).error or "damaged" in cli(path=path).error


def test_a_tokenizer_is_asked_for_where_there_is_none(cli: Cli, tmp_path: Path) -> None:
    error = cli(tokenizer=None).error
    assert "no tokenizer in it" in error
    assert "--tokenizer PATH" in error
    assert "--tokenizer bytes" in error
    assert "no_tokenizer.model" in cli(tokenizer=str(tmp_path / "no_tokenizer.model")).error


def test_a_tokenizer_that_does_not_fit_is_refused(cli: Cli, tmp_path: Path) -> None:
    small = save_tiny(tmp_path, dataclasses.replace(TINY, vocab=200))
    assert "the tokenizer has 258 ids, the model's vocabulary only 200" in cli(path=small).error


def test_ids_that_the_tokenizer_cannot_spell_are_banned() -> None:
    wide = dataclasses.replace(TINY, vocab=300)
    opened = model.OpenedModel(synthetic_state(wide), ByteTokenizer(260), LoadOptions())
    prompt = Prompt(0, "the prompt", "ab", SamplingParams(logit_bias={5: 1.0}), sized=False)
    request = generate_run.fit(prompt, opened, EngineConfig())
    assert request.params.logit_bias == {5: 1.0} | dict.fromkeys(range(260, 300), -math.inf)
    biased = dataclasses.replace(prompt, params=SamplingParams(logit_bias={260: 1.0}))
    with pytest.raises(
        UserError, match=r"the prompt: logit_bias token=260 is not the tokenizer's; .* 0 to 259"
    ):
        generate_run.fit(biased, opened, EngineConfig())


def test_unusable_logits_end_a_text_with_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    state = synthetic_state(TINY)
    broken = dict(state.weights) | {"final_norm_gain": np.full(TINY.embed, np.nan, np.float32)}
    save_checkpoint(tmp_path / "nan", CheckpointState(TINY, broken))
    run = cli("--prompt", "a", "--json", path=tmp_path / "nan")
    assert run.code == 1
    assert run.rows[0]["finish_reason"] == "error"
    assert "error: the prompt: the model's logits were not finite after 0 tokens" in run.err


def test_an_interrupt_prints_what_there_is_and_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Generator.run

    def interrupted(self: Generator, requests: Sequence[Request]) -> Iterator[TextPiece | Completion]:
        for event in real(self, requests):
            yield event
            if isinstance(event, Completion):
                raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "run", interrupted)
    words = ("--prompt", "A", "--prompt", "B", "--max_new_tokens", "9", "--logit_bias", "66=1000")
    run = cli(*words)
    assert run.code == 130
    assert run.err.startswith("interrupted: 1 of 2 texts finished, ")
    assert run.err.count("\n") == 1
    assert run.out.startswith("--- prompt 1 of 2 ---\nABBBBBBBBB\n\n--- prompt 2 of 2 ---\nBBBBBBBB")
    run = cli(*words, "--json")
    assert run.code == 130
    assert [row["prompt"] for row in run.rows] == ["A"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ModelOptions(), LoadOptions(WeightsDtype.FLOAT32, stacked=False)),  # a CPU's default
        (ModelOptions(weights="int8"), LoadOptions(WeightsDtype.INT8, stacked=False)),
        (ModelOptions(weights="bfloat16"), LoadOptions(WeightsDtype.BFLOAT16, stacked=False)),
        (ModelOptions(layers=LayersForm.STACKED), LoadOptions(WeightsDtype.FLOAT32, stacked=True)),
        (ModelOptions(layers=LayersForm.UNROLLED), LoadOptions(WeightsDtype.FLOAT32, stacked=False)),
    ],
)
def test_the_form_of_weights_is_the_one_asked_for(
    tiny: Path, options: ModelOptions, expected: LoadOptions
) -> None:
    asked = dataclasses.replace(options, checkpoint=tiny, tokenizer="bytes")
    assert model.open_model(asked).load == expected


def test_weights_are_held_as_they_are_stored(tmp_path: Path) -> None:
    state = synthetic_state(TINY)
    halves = {
        key: np.asarray(weight[...]).astype(ml_dtypes.bfloat16) for key, weight in state.weights.items()
    }
    save_checkpoint(tmp_path / "half", CheckpointState(TINY, halves))
    save_checkpoint(tmp_path / "int8", quantize_state(state))
    for name, expected in (("half", WeightsDtype.BFLOAT16), ("int8", WeightsDtype.INT8)):
        opened = model.open_model(ModelOptions(tmp_path / name, tokenizer="bytes"))
        assert opened.load.weights is expected


def test_int8_weights_are_not_made_float(cli: Cli, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "int8", quantize_state(synthetic_state(TINY)))
    assert "allowed: int8" in cli("--weights", "float32", path=tmp_path / "int8").error


def test_context_beyond_the_model_is_refused(cli: Cli, tmp_path: Path) -> None:
    short = save_tiny(tmp_path, dataclasses.replace(TINY, max_positions=32))
    assert "max_context=64 is beyond this model's 32 positions; nearest: 32" in cli(path=short).error
