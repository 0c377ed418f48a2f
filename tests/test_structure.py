"""The figures of the project's own source: sizes, annotations, and habits that a linter does not know.

Idea: what a file may cost a reader is bounded. The bounds are habits with a margin, not style: the linter
and the formatter see to that.

Data flow: source files → syntax trees → `Function` records → one law a test.

Worked example: `def f(self, x: int, y): ...` in a class has three slots to annotate (x, y, the return) and
one annotation.
"""

import ast
import dataclasses
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import ORDER, OUTSIDE, REPO, module_name, source_files

FILE_LINES, MEDIAN_FILE_LINES = 400, 150
FUNCTION_LINES, NINETIETH_FUNCTION_LINES = 100, 40
ANNOTATED = 0.97
TESTS_PER_SOURCE_LINE = 0.7
POSTPONED = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b")  # the words this project does without


@dataclasses.dataclass(frozen=True)
class Function:
    """One function's name, length, and how many of its slots carry an annotation."""

    name: str
    lines: int
    slots: int
    annotated: int


def functions(tree: ast.Module, module: str) -> Iterator[Function]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        spec = node.args
        arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
        named = [a for a in arguments if a is not None and a.arg not in ("self", "cls")]
        given = [a.annotation is not None for a in named] + [node.returns is not None]
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        yield Function(f"{module}.{node.name}", lines, len(given), sum(given))


SOURCE = source_files(*ORDER)
TESTS = source_files("tests")
EVERYTHING = source_files(*ORDER, *OUTSIDE)
TREES = {path: ast.parse(path.read_text()) for path in EVERYTHING}
LENGTHS = {path: len(path.read_text().splitlines()) for path in EVERYTHING}
FUNCTIONS = [f for path in SOURCE for f in functions(TREES[path], module_name(path))]


def written_by_hand() -> Iterator[Path]:
    """Every text that the project's people write: code, documents, settings and scripts."""
    yield from EVERYTHING
    for pattern in ("*.py", "*.md", "*.toml", "*.yaml", ".ci/*", ".github/**/*.yml", "docs/**/*.md"):
        yield from REPO.glob(pattern)


def test_a_function_is_measured_with_all_its_slots() -> None:
    tree = ast.parse("class A:\n  def f(self, x: int, y, *z: int) -> int:\n    return 1\n")
    assert list(functions(tree, "m")) == [Function("m.f", 2, 4, 3)]


def test_the_source_is_found() -> None:
    assert len(SOURCE) > 10
    assert len(FUNCTIONS) > 50


def test_files_are_short() -> None:
    long = {str(path.relative_to(REPO)): n for path, n in LENGTHS.items() if n > FILE_LINES}
    assert not long
    assert statistics.median(LENGTHS[path] for path in SOURCE) <= MEDIAN_FILE_LINES


def test_functions_are_short() -> None:
    assert not [f for f in FUNCTIONS if f.lines > FUNCTION_LINES]
    lengths = sorted(f.lines for f in FUNCTIONS)
    assert lengths[int(len(lengths) * 0.9)] <= NINETIETH_FUNCTION_LINES


def test_arguments_and_returns_are_annotated() -> None:
    share = sum(f.annotated for f in FUNCTIONS) / sum(f.slots for f in FUNCTIONS)
    missing = [f.name for f in FUNCTIONS if f.annotated < f.slots]
    assert share >= ANNOTATED, f"{share:.1%}; not annotated: {missing}"


def test_tests_keep_up_with_the_source() -> None:
    tests = sum(LENGTHS[path] for path in TESTS)
    source = sum(LENGTHS[path] for path in SOURCE)
    assert tests >= TESTS_PER_SOURCE_LINE * source, f"{tests} lines of tests for {source} of source"


def test_modules_explain_themselves() -> None:
    silent = [module_name(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent


def test_modules_export_by_name_alone() -> None:
    """No `__all__` and no star import: what has no leading underscore is public."""
    bad = []
    for path, tree in TREES.items():
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        stars = [a for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names]
        if "__all__" in names or any(alias.name == "*" for alias in stars):
            bad.append(module_name(path))
    assert not bad


def test_nothing_is_postponed_in_a_comment() -> None:
    assert POSTPONED.search("# TODO: later")
    paths = set(written_by_hand()) - {Path(__file__)}
    assert {"run", "pyproject.toml", "setup.py", "README.md", "ci.yml"} <= {path.name for path in paths}
    bad = [
        f"{path.relative_to(REPO)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if POSTPONED.search(line)
    ]
    assert not bad
