"""Words to flags: what is typed is applied or refused, and a refusal names the nearest legal thing.

Worked example: `--temprature 1` is refused with "nearest: --temperature".
"""

from typing import Any

import pytest

from inference_engine.cli.flags import parse
from inference_engine.cli.help_text import EXIT_CODES, command_help, overview
from inference_engine.cli.interrupts import EXIT_CODE, Interrupts
from inference_engine.cli.main import main
from inference_engine.cli.options import Command, Flags, Group, Kind, Option
from layers.errors import UserError


def command(run: Any = lambda flags, interrupts: 0) -> Command:
    words = Option("word", "a word", repeatable=True)
    number = Option("temperature", "a number", Kind.NUMBER, default=0.5, allowed="0 and above")
    count = Option("count", "an integer", Kind.INTEGER, default=3, metavar="N")
    choice = Option("weights", "a choice", Kind.CHOICE, choices=("float32", "bfloat16", "int8"))
    switch = Option("json", "a switch", Kind.SWITCH)
    groups = (Group("Words", (words,)), Group("Others", (number, count, choice, switch)))
    return Command("generate", "make text", ("It makes text.",), groups, run, (("so", "--json"),))


def parsed(*words: str) -> Flags:
    flags = parse(command(), words)
    assert flags is not None
    return flags


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(command(), words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_that_are_not_given_have_their_defaults() -> None:
    flags = parsed()
    assert dict(flags.values) == {"word": (), "temperature": 0.5, "count": 3, "weights": None, "json": False}
    assert flags.given == frozenset()


def test_every_way_of_writing_a_flag_is_read() -> None:
    flags = parsed("--temperature=1e-1", "--count", "-7", "-weights", "int8", "--json")
    assert dict(flags.values) == {
        "word": (), "temperature": 0.1, "count": -7, "weights": "int8", "json": True,
    }  # fmt: skip
    assert flags.given == {"temperature", "count", "weights", "json"}
    assert parsed("--nojson")["json"] is False
    assert parsed("--json=false")["json"] is False


def test_repeatable_flags_keep_their_order_and_their_characters() -> None:
    words = ("--word", "--json", "--word=", "--word", "a=b,c d\n", "--word", "é", "--word", "--help")
    assert parsed(*words)["word"] == ("--json", "", "a=b,c d\n", "é", "--help")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--temprature", "1"], ["unknown flag --temprature", "nearest: --temperature"]),
        (["--max-count", "1"], ["unknown flag --max-count", "nearest: --count"]),
        (["--zzzzzz"], ["unknown flag --zzzzzz", "--help lists them"]),
        (["--weights", "fp32"], ["fp32 is not known", "float32, bfloat16, int8", "nearest: float32"]),
        (["--weights", "INT8"], ["allowed", "nearest: int8"]),
        (["--temperature", "warm"], ["--temperature=warm is not a number", "allowed: 0 and above"]),
        (["--count", "1.5"], ["--count=1.5 is not an integer"]),
        (["--count", "9" * 5000], ["is not an integer"]),
        (["--count"], ["Missing value", "--count"]),
        (["--json=maybe"], ["--json=maybe"]),
        (["--nojson=1"], ["--nojson=1"]),
        (["--count", "1", "--count", "1"], ["--count is given 2 times"]),
        (["--json", "--nojson"], ["--json is given 2 times"]),
        (["hello", "--json"], ["unexpected 'hello'"]),
        (["--", "--json"], ["unexpected '--json'"]),
        (["--undefok=x", "--x"], ["unknown flag --undefok"]),
        (["--flagfile=/etc/hosts"], ["unknown flag --flagfile"]),
    ],
)
def test_what_is_not_legal_is_refused_in_one_line(words: list[str], parts: list[str]) -> None:
    message = refusal(*words)
    assert all(part in message for part in parts), message


def test_help_names_every_flag_its_values_and_its_default() -> None:
    text = command_help(command(), 80)
    for part in (
        "It makes text.", "Words:", "Others:", "--word TEXT", "repeatable", "--temperature NUMBER",
        "0 and above; default: 0.5", "--count N", "default: 3", "--weights float32|bfloat16|int8", "--json",
        "# so", "generate --json",
    ):  # fmt: skip
        assert part in text, part
    assert all(f"\n  {code} " in text for code, _ in EXIT_CODES)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_help_fits_the_terminal(width: int) -> None:
    for text in (command_help(command(), width), overview([command()], width)):
        prose = [
            line for line in text.splitlines() if not line.startswith(("usage", "  --", "  python", "run"))
        ]
        assert max(map(len, prose)) <= max(width, 27 + 20)


def test_help_is_shown_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "--help"], ["generate", "-h"], ["generate", "--count", "1", "--help"]):
        assert main([command()], words, Interrupts()) == 0
        out, err = capsys.readouterr()
        assert out.startswith("usage: run_serving.py generate")
        assert out.endswith("\n")
        assert err == ""
    for words in ([], ["--help"], ["help"]):
        assert main([command()], words, Interrupts()) == 0
        assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["genrate"], ["unknown command genrate", "allowed: generate", "nearest: generate"]),
        (["Generate"], ["nearest: generate"]),
        (["--json"], ["--json stands before the command", "generate"]),
        (["generate", "--jsn"], ["unknown flag --jsn", "nearest: --json"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command()], words, Interrupts()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts), err


def outcome(error: BaseException | None, code: int = 0) -> int:
    def run(flags: Flags, interrupts: Interrupts) -> int:
        if error is not None:
            raise error
        return code

    return main([command(run)], ["generate"], Interrupts())


def test_exit_codes_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {code for code, _ in EXIT_CODES}
    assert EXIT_CODE in codes
    assert outcome(None) == 0
    assert outcome(None, code=1) == 1
    assert outcome(UserError("bad\nthing")) == 2
    assert outcome(BrokenPipeError()) == 141
    assert codes == {0, 1, 2, 130, 141}
    assert capsys.readouterr() == ("", "error: bad thing\n")


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ValueError("no user's"), OSError("disk")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        outcome(error)
