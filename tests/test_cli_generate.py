"""The command `generate` from words to output, in one process; what a user starts is in test_cli_process.py.

Worked example: `generate --checkpoint TINY --tokenizer bytes --prompt ab --json` prints one object whose
prompt has 3 tokens: BOS, a, b.
"""

import dataclasses
import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.int8 import quantize_state
from checkpoints.load import LoadOptions, WeightsDtype
from checkpoints.orbax_store import save_checkpoint
from checkpoints.readers.options import ReaderOptions
from checkpoints.state import CheckpointState
from checkpoints.synthetic import synthetic_state
from inference_engine.cli import generate_run, model
from inference_engine.cli.model_flags import EngineOptions, LayersForm, ModelOptions
from inference_engine.cli.prompts import Prompt
from inference_engine.config import EngineConfig
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import ByteTokenizer
from layers.errors import UserError
from tests.cli_runs import Cli, share_programs
from tests.test_imports import REPO
from tests.tiny_checkpoint import TINY, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def cli(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    share_programs(monkeypatch)
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


def test_weights_are_held_as_they_are_stored_save_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = synthetic_state(TINY)
    halves = {
        key: np.asarray(weight[...]).astype(ml_dtypes.bfloat16) for key, weight in state.weights.items()
    }
    save_checkpoint(tmp_path / "half", CheckpointState(TINY, halves))
    save_checkpoint(tmp_path / "int8", quantize_state(state))
    save_checkpoint(tmp_path / "full", state)
    held = {}
    for on_cpu in (True, False):
        monkeypatch.setattr(model, "on_cpu", lambda answer=on_cpu: answer)
        for name in ("half", "int8", "full"):
            held[on_cpu, name] = model.default_weights(model.open_checkpoint(tmp_path / name).state)
    assert held == {
        (True, "half"): "float32", (True, "int8"): "int8", (True, "full"): "float32",
        (False, "half"): "bfloat16", (False, "int8"): "int8", (False, "full"): "float32",
    }  # fmt: skip


@pytest.mark.parametrize(("vocab", "ids", "marks"), [(256, 256, False), (258, 258, True), (300, 300, True)])
def test_bytes_need_no_marks_where_the_model_has_none(vocab: int, ids: int, marks: bool) -> None:
    tokenizer = model.byte_tokenizer(vocab)
    assert tokenizer.vocab_size == ids
    assert (tokenizer.bos_id, tokenizer.eos_id) == ((256, 257) if marks else (None, None))
    assert tokenizer.decode(tokenizer.encode("né")) == "né"


@pytest.mark.parametrize("offset", [0, 1])
def test_the_reading_of_norm_gains_is_the_one_asked_for(offset: int) -> None:
    path = REPO / "tests" / "oracles" / "palm_rlhf_0.2.1.npz"
    opened = model.open_model(ModelOptions(path, tokenizer="bytes", reader=ReaderOptions(offset)))
    assert opened.hparams.norm_gain_offset == offset


def test_sizes_that_are_not_given_suit_the_model() -> None:
    config = EngineConfig(slots=4, max_context=512, prefill_chunk=64)
    assert EngineOptions(config).resolve(None, 2, "float32") == dataclasses.replace(config, top_logprobs=2)
    short = EngineOptions(config).resolve(32, 0, "bfloat16")
    assert (short.max_context, short.prefill_chunk, short.activation_dtype) == (32, 32, "bfloat16")
    asked = EngineOptions(config, slots=1, max_context=100, prefill_chunk=7, activation_dtype="float32")
    sizes = asked.resolve(4096, 0, "bfloat16")
    assert sizes == EngineConfig(slots=1, max_context=100, prefill_chunk=7, activation_dtype="float32")
