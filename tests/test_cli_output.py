"""What is printed: texts in the order of the prompts, whole lines, whole objects, nothing interleaved.

Worked example: the second of two texts ends first. It is printed after the first, under its own header.
"""

import io
import itertools
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from inference_engine.cli.errors import OutputError
from inference_engine.cli.output import InOrder, JsonPrinter, TextPrinter
from inference_engine.cli.prompts import Prompt
from inference_engine.cli.report import RunReport, quantity
from inference_engine.cli.terminal import Output, Stream, note, styled, visible
from inference_engine.generate import TextPiece
from inference_engine.request import Completion, FinishReason
from inference_engine.sampling_params import SamplingParams
from inference_engine.tokenizer import ByteTokenizer
from tests.cli_screen import screen

Event = TextPiece | Completion


def prompt(index: int, text: str, samples: int = 1, logprobs: int | None = None) -> Prompt:
    params = SamplingParams(temperature=1.0, num_samples=samples, logprobs=logprobs)
    return Prompt(index, f"prompt {index + 1}", text, params, sized=False)


def completion(index: int, sample: int, text: str, reason: FinishReason = FinishReason.LENGTH) -> Completion:
    ids = tuple(text.encode())
    logprobs, top = tuple(-0.5 for _ in ids), tuple(((i, -0.5), (257, -2.0)) for i in ids)
    return Completion(index, sample, "", text, ids, reason, 3, logprobs, top)


def events_of(index: int, sample: int, text: str) -> list[Event]:
    pieces = [TextPiece(index, sample, text[i : i + 3]) for i in range(0, len(text), 3)]
    return [*pieces, completion(index, sample, text)]


def mixed(seed: int, lists: Sequence[list[Event]]) -> list[Event]:
    """The lists' events shuffled, each list in its own order."""
    order = [i for i, events in enumerate(lists) for _ in events]
    random.Random(seed).shuffle(order)
    left = [iter(events) for events in lists]
    return [next(left[i]) for i in order]


TEXTS = {(0, 0): "sing, goddess", (0, 1): "of rage", (1, 0): "arma virumque\n", (1, 1): ""}
PROMPTS = [prompt(0, "A:\n", 2), prompt(4, "B", 2)]


def run_text(events: Sequence[Event], prompts: Sequence[Prompt] = PROMPTS) -> InOrder:
    in_order = InOrder(prompts, TextPrinter(prompts, Output()))
    for event in events:
        in_order.take(event)
    return in_order


@pytest.mark.parametrize("seed", range(6))
def test_the_output_does_not_depend_on_which_text_ends_first(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_text(mixed(seed, [events_of(*key, text) for key, text in TEXTS.items()]))
    assert capsys.readouterr().out == (
        "--- prompt 1 of 2, sample 1 of 2 ---\nA:\nsing, goddess\n\n"
        "--- prompt 1 of 2, sample 2 of 2 ---\nA:\nof rage\n\n"
        "--- prompt 2 of 2, sample 1 of 2 ---\nBarma virumque\n\n"
        "--- prompt 2 of 2, sample 2 of 2 ---\nB\n"
    )


def test_the_first_unfinished_text_is_shown_live(capsys: pytest.CaptureFixture[str]) -> None:
    in_order = InOrder(PROMPTS, TextPrinter(PROMPTS, Output()))
    shown = []
    for event in (
        TextPiece(0, 0, "si"),
        TextPiece(1, 0, "ar"),
        TextPiece(0, 0, "ng"),
        completion(1, 0, "ar"),
    ):
        in_order.take(event)
        shown.append(capsys.readouterr().out)
    assert shown == ["--- prompt 1 of 2, sample 1 of 2 ---\nA:\nsi", "", "ng", ""]
    in_order.take(completion(0, 0, "sing"))
    assert capsys.readouterr().out == "\n\n--- prompt 1 of 2, sample 2 of 2 ---\nA:\n"


def test_one_text_has_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    run_text(events_of(0, 0, "sing"), [prompt(0, "A:\n")])
    assert capsys.readouterr().out == "A:\nsing\n"


def test_headers_name_only_what_there_is_several_of(capsys: pytest.CaptureFixture[str]) -> None:
    run_text([*events_of(0, 0, "x"), *events_of(0, 1, "y")], [prompt(0, "A", 2)])
    assert capsys.readouterr().out == "--- sample 1 of 2 ---\nAx\n\n--- sample 2 of 2 ---\nAy\n"
    run_text([*events_of(0, 0, "x"), *events_of(1, 0, "y")], [prompt(0, "A"), prompt(1, "B")])
    assert "--- prompt 2 of 2 ---\nBy\n" in capsys.readouterr().out


def test_an_interrupt_prints_all_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        TextPiece(0, 0, "si"),
        TextPiece(1, 0, "arma"),
        *events_of(0, 1, "of rage"),
        TextPiece(0, 0, "n"),
    ]
    run_text(events).interrupted()
    assert capsys.readouterr().out == (
        "--- prompt 1 of 2, sample 1 of 2 ---\nA:\nsin\n\n"
        "--- prompt 1 of 2, sample 2 of 2 ---\nA:\nof rage\n\n"
        "--- prompt 2 of 2, sample 1 of 2 ---\nBarma\n"
    )


def run_json(events: Sequence[Event], prompts: Sequence[Prompt] = PROMPTS) -> InOrder:
    in_order = InOrder(prompts, JsonPrinter(prompts, Output(), ByteTokenizer()))
    for event in events:
        in_order.take(event)
    return in_order


@pytest.mark.parametrize("seed", range(3))
def test_json_is_one_object_a_text_in_order(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(mixed(seed, [events_of(*key, text) for key, text in TEXTS.items()]))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["index"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert rows[0] == {
        "index": 0, "sample": 0, "prompt": "A:\n", "text": "sing, goddess", "token_ids": [*b"sing, goddess"],
        "finish_reason": "length", "prompt_tokens": 3, "completion_tokens": 13,
    }  # fmt: skip


def test_interrupted_json_is_whole_objects_only(capsys: pytest.CaptureFixture[str]) -> None:
    in_order = run_json([TextPiece(0, 0, "si"), *events_of(0, 1, "of rage"), TextPiece(1, 1, "x")])
    assert capsys.readouterr().out == ""
    in_order.interrupted()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["text"] == "of rage"


def test_json_is_ascii_whatever_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = "é\u2028\x1b[2J\ufffd\U0001f600"
    run_json([completion(0, 0, text)], [prompt(0, text)])
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out)["text"] == json.loads(out)["prompt"] == text


def test_log_probabilities_are_given_with_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run_json([completion(0, 0, "hé")], [prompt(0, "A", logprobs=2)])
    row = json.loads(capsys.readouterr().out)
    assert len(row["logprobs"]) == 3
    assert row["logprobs"][0] == {
        "token_id": 104, "token": "h", "logprob": -0.5,
        "top": [
            {"token_id": 104, "token": "h", "logprob": -0.5}, {"token_id": 257, "token": "", "logprob": -2.0},
        ],
    }  # fmt: skip


def test_a_number_that_json_lacks_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    odd = Completion(0, 0, "", "a", (97,), FinishReason.STOP, 1, (float("-inf"),), (((300, 0.0),),))
    run_json([odd], [prompt(0, "A", logprobs=1)])
    (row,) = json.loads(capsys.readouterr().out)["logprobs"]
    assert row["logprob"] is None
    assert row["top"][0]["token"] == ""  # an id that the tokenizer does not have


def test_a_terminal_obeys_nothing_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = screen(monkeypatch)
    run_text(events_of(0, 0, "a\x1b[2J\r\x07\x9bb\tc\n"), [prompt(0, "[bold]P\x1b")])
    assert stdout.getvalue() == "\x1b[1m[bold]P␛\x1b[0ma␛[2J␍␇\ufffdb\tc\n"


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    run_text(events_of(0, 0, "a\x1b[2J"), [prompt(0, "P\x1b")])
    assert capsys.readouterr().out == "P\x1ba\x1b[2J\n"
    assert styled("x", "bold", Stream.OUT) == "x"


def test_every_control_character_is_shown_as_a_picture() -> None:
    controls = "".join(map(chr, itertools.chain(range(32), range(127, 160))))
    assert {c for c in visible(controls) if ord(c) < 160} == {"\n", "\t"}
    assert visible("né ’\U0001f600") == "né ’\U0001f600"


def test_a_note_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    note("error", "a\n  b\x1b", "bold")
    note("", "only this", "")
    note("only that", "", "dim")
    assert capsys.readouterr().err == "error: a b␛\nonly this\nonly that\n"


class Failing(io.StringIO):
    """A stream that fails as a full disk or a closed pipe does."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def flush(self) -> None:
        raise self.error


def test_output_that_cannot_be_written_is_told_from_a_reader_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="No space left on device"):
        Output().write("x")
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        Output().write("x")
    monkeypatch.undo()


def report(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "platform": "cpu", "device_kind": "cpu", "devices": 1, "parameters": 5_470_000, "weights": "float32",
        "activations": "float32", "cache": "float32", "prefill_rate": 1204.4, "decode_rate": 48.4,
        "step_milliseconds": 19.8,
        "weight_bytes": 21_900_000, "cache_bytes": 3_145_728,
    }  # fmt: skip
    return RunReport(**fields | changes).line()


def test_the_last_line_says_where_and_how_fast() -> None:
    assert report() == (
        "cpu ×1 · 5.47 M parameters, float32 · prefill 1,204 tokens/s · decode 48 tokens/s, 19.80 ms/token · "
        "weights 21.9 MB, cache 3.15 MB"
    )
    tpu = report(
        platform="tpu", device_kind="TPU v5 lite", devices=16, weights="int8", activations="bfloat16"
    )
    assert tpu.startswith("tpu (TPU v5 lite) ×16 · 5.47 M parameters, int8/bfloat16 · ")
    assert "prefill –" in report(prefill_rate=0.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 "),
        (999, "999 "),
        (1000, "1.00 k"),
        (99_960, "100 k"),
        (999_600, "1.00 M"),
        (540_360_000_000, "540 G"),
    ],
)
def test_quantities_have_three_digits(number: int, text: str) -> None:
    assert quantity(number) == text
