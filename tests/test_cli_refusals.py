"""Bad input to `generate`: one clear line, a non-zero exit code, nothing on stdout, no traceback.

Worked example: `--top_p 3` gives "error: --top_p=3.0 is not allowed; allowed: …; nearest: 1.0" and code 2.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpoints.int8 import quantize_state
from checkpoints.load import WeightsDtype
from checkpoints.orbax_store import save_checkpoint
from checkpoints.synthetic import synthetic_state
from configs.models import palm_540b
from inference_engine.cli.memory import available_bytes, check_memory, needed_bytes
from inference_engine.config import EngineConfig
from layers.errors import UserError
from tests.cli_runs import CONTEXT, Cli, share_programs
from tests.tiny_checkpoint import TINY, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def cli(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    share_programs(monkeypatch)
    return Cli(tiny, capsys)


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
    assert [line.partition("line ")[2][:2] for line in skipped] == ["2:", "3:", "4:"]
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
    (["--kv_cache_dtype", "int4"], "allowed: auto, int8; nearest: int8"),
    (["--gamma_offset", "1"], "drop gamma_offset"),
    (["--dim_head", "8"], "already says how wide its heads are; drop dim_head"),
    (
        ["--logprobs", "99", "--json"],
        "--logprobs=99 is not allowed; allowed: 0 to 20 alternatives a token; nearest: 20",
    ),
    (
        ["--mesh", "2,2,2", "--layout", "2d_time_z"],
        "a decode step has one token a row; nearest: --prefill_layout 2d_time_z",
    ),
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
    assert "weights_0: truncated or changed: " in cli(path=path).error


def test_a_tokenizer_is_asked_for_where_there_is_none(cli: Cli, tmp_path: Path) -> None:
    error = cli(tokenizer=None).error
    assert "no tokenizer in it" in error
    assert "--tokenizer PATH" in error
    assert "--tokenizer bytes" in error
    assert "allowed: a path, or bytes; nearest: bytes" in cli(tokenizer="byte").error
    assert "no_tokenizer.model" in cli(tokenizer=str(tmp_path / "no_tokenizer.model")).error


def test_a_tokenizer_that_does_not_fit_is_refused(cli: Cli, tmp_path: Path) -> None:
    small = save_tiny(tmp_path, dataclasses.replace(TINY, vocab=200))
    assert "the tokenizer has 256 ids, the model's vocabulary only 200" in cli(path=small).error


def test_int8_weights_are_not_made_float(cli: Cli, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "int8", quantize_state(synthetic_state(TINY)))
    assert "allowed: int8" in cli("--weights", "float32", path=tmp_path / "int8").error


def test_context_beyond_the_model_is_refused(cli: Cli, tmp_path: Path) -> None:
    short = save_tiny(tmp_path, dataclasses.replace(TINY, max_positions=32))
    assert "max_context=64 is beyond this model's 32 positions; nearest: 32" in cli(path=short).error


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (
            EngineConfig(slots=4, max_context=10**9),
            WeightsDtype.FLOAT32,
            "a smaller --slots or --max_context",
        ),
        (EngineConfig(), WeightsDtype.FLOAT32, "a smaller --weights"),
    ],
)
def test_what_cannot_fit_into_memory_is_refused_before_it_is_loaded(
    config: EngineConfig, weights: WeightsDtype, words: str
) -> None:
    model = TINY if config.max_context > 512 else palm_540b()
    with pytest.raises(UserError, match=f"do not fit into 24.0 GB of memory; nearest: {words}"):
        check_memory(model, weights, config, 24 * 10**9)
    check_memory(model, weights, config, None)
    check_memory(TINY, weights, EngineConfig(), 24 * 10**9)


def test_bytes_are_counted_as_the_engine_counts_them() -> None:
    config = EngineConfig(slots=3, max_context=100, prefill_chunk=64, activation_dtype="bfloat16")
    weights, cache = needed_bytes(TINY, WeightsDtype.BFLOAT16, config)
    assert weights == 2 * TINY.param_count
    assert cache == 2 * 2 * 16 * 2 * 128 * (3 + 1)  # k and v, layers, qkv, bytes, positions, rows
    rounded = dataclasses.replace(config, kv_cache_dtype="int8")
    assert needed_bytes(TINY, WeightsDtype.BFLOAT16, rounded)[1] == 2 * 2 * (16 + 4) * 128 * (3 + 1)
    assert (
        needed_bytes(TINY, WeightsDtype.BFLOAT16, rounded, generates=False)[1] == 2 * 2 * (16 + 4) * 128 * 3
    )
    assert (available_bytes() or 0) > 10**8


def test_a_huge_engine_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real way to an engine
    assert "do not fit into" in cli("--slots", "1000000000").error
