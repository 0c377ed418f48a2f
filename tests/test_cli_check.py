"""Laws of the command `check`: what it prints and how it ends. What it computes: test_check_power."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import run_serving
from checkpoints.int8 import quantize_state
from checkpoints.synthetic import synthetic_state
from inference_engine.checking.cases import Case, Factors, covering_cases, illegal_settings
from inference_engine.checking.run import Row
from inference_engine.cli import check_run
from inference_engine.cli.check_run import legal
from inference_engine.cli.check_table import WIDTH, table
from layers.errors import UserError
from layers.mesh_shape import MeshShape
from tests.cli_runs import Run
from tests.tiny_checkpoint import TINY, save_tiny

FIELDS = {
    "layout", "prefill_layout", "attn_all_to_all", "context", "prefill_context", "collectives", "weights",
    "activation_dtype", "reduce_dtype", "kv_cache_dtype", "prefixes", "batch", "prompt_tokens", "max_rel_err",
    "tokens_equal", "ties", "ok",
}  # fmt: skip


@dataclasses.dataclass
class FakeChecker:
    """Finds every case equal but those with int8 weights, if `broken`."""

    broken: bool

    def __call__(self, *args: object, **kwargs: object) -> "FakeChecker":
        return self

    def rows(self, cases: Iterable[Case]) -> Iterator[Row]:
        for case in cases:
            ok = not self.broken or case.weights != "int8"
            yield Row(case, 2e-6 if ok else 0.5, ok, 0, ok)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path)


def _check(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str,
    broken: bool = False,
) -> Run:  # fmt: skip
    monkeypatch.setattr(check_run, "Checker", FakeChecker(broken))
    code = run_serving.main(["check", "--checkpoint", str(tiny), *words])
    return Run(code, *capsys.readouterr())


def test_json_is_one_object_alone_on_stdout(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _check(tiny, monkeypatch, capsys, "--json", "--mesh", "2,1,3")
    (value,) = run.rows
    assert (run.code, value["mesh"], value["ok"]) == (0, "2,1,3", True)
    shape = MeshShape(2, 1, 3)
    listed = [(entry["setting"], entry["reason"]) for entry in value["illegal"]]
    assert listed == illegal_settings(Factors(), shape)
    assert all(set(row) == FIELDS for row in value["rows"])
    assert len(value["rows"]) == len(covering_cases(Factors(), shape))
    assert json.dumps(value) + "\n" == run.out


def test_a_difference_is_exit_code_1(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _check(tiny, monkeypatch, capsys, broken=True)
    assert run.code == 1
    assert "DIFFERS" in run.out
    assert "failed: mesh 2,2,2: " in run.err
    assert " differ" in run.err


def test_a_flag_narrows_the_check(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--json", "--exhaustive", "--weights", "int8", "--collectives", "latency", "--layout", "1d")
    contexts = ("--context_parallel", "xz", "--decode_context_parallel", "none")
    (value,) = _check(tiny, monkeypatch, capsys, *words, *contexts).rows
    names = ("weights", "collectives", "layout", "prefill_context", "context")
    found = {tuple(row[name] for name in names) for row in value["rows"]}
    assert found == {("int8", "latency", "1d", "xz", "none")}
    assert len(value["rows"]) == 4 * 2 * 2 * 2 * 2 * 3 * 3


def test_the_table_fits_its_width() -> None:
    rows = [Row(case, 2.5e-6, False, 12, False) for case in covering_cases(Factors(), MeshShape(2, 2, 2))]
    lines = table(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert max(map(len, lines)) <= WIDTH
    assert all("DIFFERS" in line for line in lines[1:])


def test_what_an_int8_checkpoint_cannot_be_is_listed_with_the_reason() -> None:
    state = quantize_state(synthetic_state(TINY))
    factors, illegal = legal(state, Factors())
    assert factors.weights == ("int8",)
    assert [setting for setting, _ in illegal] == ["weights float32", "weights bfloat16"]
    assert all("rounding cannot be undone" in reason for _, reason in illegal)
    with pytest.raises(UserError, match="nearest: --weights int8"):
        legal(state, Factors(weights=("float32",)))


def test_a_mesh_that_the_model_does_not_fit_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _check(tiny, monkeypatch, capsys, "--mesh", "5,1,1")
    assert run.code == 2
    assert "embed=48 does not divide over the 5 chips" in run.err
