"""Laws of the command `score`: what it prints, and what it refuses in one line."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

import run_serving
from inference_engine.cli import model, score_run
from inference_engine.config import EngineConfig
from inference_engine.scoring import Scorer
from tests.cli_runs import Run
from tests.tiny_checkpoint import save_tiny

TEXT = "Né, no."
SIZES = ("--max_context", "16", "--prefill_chunk", "8")
TOTALS = {"bytes", "scored_tokens", "logprob", "bits_per_byte", "perplexity", "context", "stride", "windows"}


class Score:
    """Runs `score` on the tiny checkpoint."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    def __call__(self, *words: str, tokenizer: str = "bytes") -> Run:
        source = ("--checkpoint", str(self.path), "--tokenizer", tokenizer)
        code = run_serving.main(["score", *source, *SIZES, *words])
        return Run(code, *self.capsys.readouterr())


@pytest.fixture
def score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Score:
    return Score(save_tiny(tmp_path), capsys)


def test_json_is_one_object_alone_on_stdout(score: Score) -> None:
    run = score("--text", TEXT, "--json")
    (value,) = run.rows
    assert run.code == 0 and set(value) == TOTALS | {"tokens"}
    # The byte tokenizer marks the beginning, so every byte is scored.
    assert (value["bytes"], value["scored_tokens"], value["windows"]) == (8, 8, 1)
    assert [token["token_id"] for token in value["tokens"]] == list(TEXT.encode())
    assert value["logprob"] == pytest.approx(sum(token["logprob"] for token in value["tokens"]), abs=1e-4)
    assert value["bits_per_byte"] == pytest.approx(-value["logprob"] / math.log(2) / 8, abs=1e-5)
    assert "score " in run.err and "tokens/s" in run.err


def test_a_known_model_is_named_as_for_generate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_serving.main(["score", "--model", "smollm2", "--text", TEXT]) == 2
    error = capsys.readouterr().err
    assert "--model=smollm2 is not known; allowed: smollm2-135m; nearest: smollm2-135m" in error


def test_lines_are_tokens_and_totals(score: Score) -> None:
    run = score("--text", TEXT)
    *lines, totals = run.out.splitlines()
    assert [line.split()[1] for line in lines if "' '" not in line][:3] == ["'N'", "'\ufffd'", "'\ufffd'"]
    assert len(lines) == 8
    assert totals.startswith("8 tokens, 8 bytes: log-probability -")
    assert score("--text", TEXT, "--summary").out.splitlines() == [totals]


def test_a_file_of_any_length_is_scored(score: Score, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 5)
    (value,) = score("--file", str(path), "--json", "--summary", "--stride", "5").rows
    assert set(value) == TOTALS
    assert (value["scored_tokens"], value["stride"], value["windows"]) == (40, 5, 6)
    assert "context 16, stride 5: " in score("--file", str(path), "--summary", "--stride", "5").out


def test_text_on_a_mesh_scores_as_on_one_device(score: Score) -> None:
    words = ("--text", TEXT * 5, "--json", "--summary")
    (alone,) = score(*words).rows
    (meshed,) = score(*words, "--mesh", "2,2,2", "--attn_all_to_all", "yz").rows
    assert meshed == alone | {key: pytest.approx(alone[key], rel=1e-5) for key in TOTALS}


def test_an_int8_cache_scores_nearly_the_same(score: Score) -> None:
    words = ("--text", TEXT, "--json", "--summary")
    (exact,), (rounded,) = score(*words).rows, score(*words, "--kv_cache_dtype", "int8").rows
    assert exact["logprob"] != rounded["logprob"] == pytest.approx(exact["logprob"], rel=1e-2)
    assert "int8 cache" in score(*words, "--kv_cache_dtype", "int8").err


def test_a_first_token_without_a_mark_before_it_is_left_out(
    score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmarked(vocab: int) -> model.ByteTokenizer:
        tokenizer = model.ByteTokenizer(vocab)
        tokenizer.bos_id = None
        return tokenizer

    monkeypatch.setattr(model, "byte_tokenizer", unmarked)
    (value,) = score("--text", "abc", "--json").rows
    assert (value["bytes"], value["scored_tokens"]) == (2, 2)
    assert [token["logprob"] is None for token in value["tokens"]] == [True, False, False]
    assert score("--text", "abc").out.splitlines()[0].split() == ["–", "'a'"]
    assert "1 tokens and no beginning-of-text token" in score("--text", "a").error


def test_logits_that_are_not_finite_are_exit_code_1(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Scorer):
        """Everything is NaN."""

        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.params = self.params.replace(embedding=self.params.embedding * math.nan)

    monkeypatch.setattr(model, "Scorer", Broken)
    run = score("--text", "ab", "--json")
    assert run.code == 1
    assert run.rows[0]["bits_per_byte"] is None
    assert "error: the model's logits were not finite at 2 tokens" in run.err


def test_short_texts_take_no_more_rows_than_windows(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []
    load = model.load_scorer

    def watched(opened: model.OpenedModel, config: EngineConfig, interrupts: object) -> Scorer:
        seen.append(config)
        return load(opened, config, interrupts)

    monkeypatch.setattr(score_run, "load_scorer", watched)
    score("--text", TEXT)
    score("--text", TEXT * 5, "--slots", "2")
    assert [config.slots for config in seen] == [1, 2]


REFUSED = [
    ([], "neither --text nor --file is given"),
    (["--text", "a", "--file", "b"], "--text and --file are both given; allowed: one text"),
    (["--text", ""], "the text is empty; it needs at least one character"),
    (["--text", "a\udcff"], "the text is not UTF-8: byte 0xFF at position 1"),
    (["--file", "gone.txt"], "gone.txt: no such file"),
    (["--file", "."], "a folder; expected a text file"),
    (["--text", "a", "--stride", "0"], "--stride=0 is not allowed; allowed: 1 to 15 with a context of 16"),
    (["--text", "a", "--stride", "16"], "nearest: 15"),
    (["--text", "a", "--slots", "0"], "--slots=0 is not allowed"),
    (["--text", "a", "--layout", "1d"], "nearest: --mesh 2,2,2 --layout 1d"),
    (["--txt", "a"], "nearest: --text"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED, ids=[" ".join(words)[:30] for words, _ in REFUSED])
def test_bad_input_is_one_line(score: Score, words: Sequence[str], part: str) -> None:
    assert part in score(*words).error


def test_a_context_beyond_memory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--checkpoint", str(save_tiny(tmp_path)), "--tokenizer", "bytes", "--text", "a")
    code = run_serving.main(["score", *words, "--max_context", "100000000000"])
    assert "do not fit into" in Run(code, *capsys.readouterr()).error


def test_files_that_hold_no_text_are_one_line(score: Score, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"abc\xff")
    assert f"{path} is not UTF-8: byte 0xFF at position 3" in score("--file", str(path)).error
    path.write_bytes(b"")
    assert f"{path} is empty" in score("--file", str(path)).error
