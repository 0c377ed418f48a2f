"""What the documents say is so: links lead somewhere, and commands name flags that exist.

Idea: README.md, the other documents in the root and docs/ are read as text. A relative link has to lead to
a file, and its fragment to a heading; each `run_serving.py COMMAND --flag` in a code block has to be in that
command's own help; .ci/run runs the README's two commands, so the markers that it looks for must be there.

Data flow: documents → links and commands → the file system and the command line's help.

Worked example: `[Layouts](docs/layouts.md#two-meshes)` needs docs/layouts.md with a heading "Two meshes".
"""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import REPO

DOCUMENTS = sorted([*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("checkpoints/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
# Folders of one machine or one person; a document speaks about the repository's own paths.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root|home|Users|opt|mnt|workspace)/")
CLI = REPO / "run_serving.py"


def slug(heading: str) -> str:
    """The fragment that leads to a heading, as code hosts form it."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


def fragments(document: Path) -> set[str]:
    return {slug(heading) for heading in HEADING.findall(FENCE.sub("", document.read_text()))}


def broken_links(document: Path, text: str) -> list[str]:
    bad = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (fragment and fragment not in fragments(path)):
            bad.append(target)
    return bad


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Every call of the command line in code blocks: its command and its flags."""
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [call for line in lines if CLI.name in line for call in calls_in(line)]


def calls_in(line: str) -> list[tuple[str, list[str]]]:
    """The same for one shell line, which may chain several programs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    programs: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            programs.append([])
        else:
            programs[-1].append(word)
    found = []
    for words in programs:
        starts = [i for i, word in enumerate(words) if Path(word).name == CLI.name]
        if starts:
            rest = words[starts[0] + 1 :]
            flags = [word.lstrip("-").partition("=")[0] for word in rest if word.startswith("--")]
            found.append((rest[0] if rest and not rest[0].startswith("-") else "", flags))
    return found


@functools.cache
def help_of(command: str) -> str:
    words = [sys.executable, str(CLI), *([command] if command else []), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def test_the_readers_of_documents_see() -> None:
    text = "# A `b` c\n[x](#a-b-c) [y](#none) [z](gone.md) [w](https://example.org)\n"
    assert broken_links(REPO / "README.md", "[x](CHANGELOG.md)") == []
    assert broken_links(REPO / "README.md", text) == ["#a-b-c", "#none", "gone.md"]
    assert slug("A `b` c: d") == "a-b-c-d"
    block = "```bash\npython run_serving.py generate --prompt 'a; b' \\\n --top_k=3 && ls --all\n```\n"
    assert commands(block) == [("generate", ["prompt", "top_k"])]
    assert MACHINE_PATH.search("see /home/somebody/x")
    assert not MACHINE_PATH.search("see docs/home/x")


def test_there_are_documents() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(document: Path) -> None:
    assert not broken_links(document, document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_documents_name_no_machine(document: Path) -> None:
    assert not MACHINE_PATH.search(document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_commands_use_flags_that_exist(document: Path) -> None:
    for command, flags in commands(document.read_text()):
        unknown = [
            flag for flag in flags if not re.search(rf"--(\[no\])?{re.escape(flag)}\b", help_of(command))
        ]
        assert not unknown, f"{command} --help does not name {unknown}"


def test_the_readme_holds_the_commands_that_ci_runs() -> None:
    text = (REPO / "README.md").read_text()
    for name in ("run", "test"):
        found = re.findall(
            rf"^<!-- ci:{name} -->\n```bash\n(.+?)\n```\n<!-- /ci:{name} -->$", text, re.MULTILINE
        )
        assert len(found) == 1
        assert found[0].startswith("python3 -m venv .venv && ")
        assert f"run_readme {name}\n" in (REPO / ".ci" / "run").read_text()
    assert "run_serving.py" in text
