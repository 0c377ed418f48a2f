"""Laws of sharing prefixes from the command line: the texts stay the same, one line says what is shared."""

from pathlib import Path

import pytest

from tests.cli_runs import Cli, share_programs
from tests.tiny_checkpoint import save_tiny

SAMPLED = ("--temperature", "1", "--seed", "3", "--max_new_tokens", "6", "--json")
PREFIX = "Once upon a time, "


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    share_programs(monkeypatch)
    return Cli(save_tiny(tmp_path), capsys)


def test_a_shared_prefix_gives_the_texts_of_whole_prompts(cli: Cli) -> None:
    whole = cli("--prompt", PREFIX + "a king", "--prompt", PREFIX + "no one", "--num_samples", "2", *SAMPLED)
    shared = cli(
        "--shared_prefix", PREFIX, "--prompt", "a king", "--prompt", "no one", "--num_samples", "2", *SAMPLED
    )
    assert (whole.code, shared.code) == (0, 0), shared.err
    assert shared.rows == whole.rows
    assert "sharing: 19 tokens held once for 4 texts; a slot holds 16 positions instead of 64" in shared.err
    assert "sharing" not in whole.err


def test_what_prompts_begin_with_is_found(cli: Cli) -> None:
    prompts = ("--prompt", PREFIX + "a king", "--prompt", PREFIX + "no one lived in it", *SAMPLED)
    shared = cli(*prompts, "--share_prefixes")
    assert shared.rows == cli(*prompts).rows
    assert "sharing: 19 tokens held once for 2 texts" in shared.err


def test_samples_share_their_prompt(cli: Cli) -> None:
    words = ("--prompt", PREFIX, "--num_samples", "3", *SAMPLED)
    shared = cli(*words, "--share_prefixes")
    assert shared.rows == cli(*words).rows
    assert "sharing: 18 tokens held once for 3 texts" in shared.err


def test_a_files_prompts_follow_the_prefix(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a king", "num_samples": 2}\n{"prompt": "no one"}\n')
    shared = cli("--prompts_file", str(path), "--shared_prefix", PREFIX, *SAMPLED)
    assert [row["prompt"] for row in shared.rows] == [PREFIX + "a king"] * 2 + [PREFIX + "no one"]


def test_where_nothing_is_alike_it_says_so(cli: Cli) -> None:
    run = cli("--prompt", "a king", "--prompt", "no one", "--share_prefixes", *SAMPLED)
    assert run.code == 0
    assert "sharing: 2 texts begin with less than 8 tokens in common; nothing is shared" in run.err


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "--shared_prefix is empty; it needs at least one character"),
        ("a\udcff", "--shared_prefix is not UTF-8"),
    ],
)
def test_a_prefix_that_is_no_text_is_refused(cli: Cli, text: str, part: str) -> None:
    assert part in cli("--shared_prefix", text, "--prompt", "a").error


def test_a_prefix_counts_for_the_context(cli: Cli) -> None:
    assert (
        "the prompt has 71 tokens; allowed: at most 63"
        in cli("--shared_prefix", "x" * 60, "--prompt", "y" * 10).error
    )
