"""Prompts in: each line of a file is a prompt or a bad line with its number and reason.

Worked example: of the lines `{"prompt": "a"}`, an empty one and `{"prompt": 3}` the third is bad.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_engine.cli.options import Flags
from inference_engine.cli.prompts import (
    BadLine,
    Chat,
    Prompt,
    keep_good,
    prompts_from_flags,
    read_prompts_file,
)
from inference_engine.cli.sampling_flags import (
    fields_from_flags,
    fields_from_line,
    sampling_group,
    sampling_params,
)
from inference_engine.sampling_params import SamplingParams
from layers.errors import UserError

FIELDS: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 128}


def read(tmp_path: Path, data: bytes | str, fields: dict[str, Any] = FIELDS) -> list[Prompt | BadLine]:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_prompts_file(path, fields, sized=False, first=0)


def reason(tmp_path: Path, line: bytes | str) -> str:
    (found,) = read(tmp_path, line)
    assert isinstance(found, BadLine), found
    assert "\n" not in found.reason
    return found.reason


def test_a_line_overrides_the_flags(tmp_path: Path) -> None:
    line = {
        "prompt": "a\nb", "seed": 2**63, "temperature": 0.1, "stop": "END", "stop_id": 3, "top_k": 4,
        "logit_bias": {"5": -1.5, "6": "-inf"}, "max_new_tokens": 7, "num_samples": 2, "logprobs": 1,
    }  # fmt: skip
    first, second = read(tmp_path, json.dumps(line) + '\n{"prompt": "c"}\n')
    assert isinstance(first, Prompt)
    assert isinstance(second, Prompt)
    assert first.text == "a\nb"
    assert first.params == SamplingParams(
        seed=2**63, temperature=0.1, stop_strings=("END",), stop_ids=(3,), top_k=4, max_new_tokens=7,
        logit_bias={5: -1.5, 6: float("-inf")}, num_samples=2, logprobs=1,
    )  # fmt: skip
    assert second.params == SamplingParams(**FIELDS)
    assert (first.sized, second.sized) == (True, False)
    assert (first.index, second.index) == (0, 1)


def test_a_list_of_stops_is_taken_as_it_is(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, '{"prompt": "a", "stop": ["x", "y"], "stop_id": [1, 2]}')
    assert isinstance(prompt, Prompt)
    assert prompt.params.stop_strings == ("x", "y")
    assert prompt.params.stop_ids == (1, 2)


def test_a_line_may_be_a_question_to_answer(tmp_path: Path) -> None:
    found = read(tmp_path, '{"chat": "a", "seed": 3}\n{"chat": "b", "system": "c"}\n{"prompt": "d"}')
    prompts = [prompt for prompt in found if isinstance(prompt, Prompt)]
    assert [prompt.text for prompt in prompts] == ["a", "b", "d"]
    assert [prompt.chat for prompt in prompts] == [Chat(), Chat("c"), None]
    assert prompts[0].params.seed == 3


def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    plain = read(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}')
    assert read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n') == plain
    assert [prompt.text for prompt in plain if isinstance(prompt, Prompt)] == ["a", "b"]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, '{"prompt": "a\u2028b\u0085c"}')
    assert isinstance(prompt, Prompt)
    assert prompt.text == "a\u2028b\u0085c"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["not JSON"]),
        ("hello", ["not JSON", "hello"]),
        ("[1]", ["an array", "expected an object"]),
        ('"a"', ["a text", "expected an object"]),
        ("3", ["a number"]),
        ("null", ["null"]),
        ("true", ["a boolean"]),
        ("{}", ['no key "prompt" or "chat"']),
        ('{"prompt": "a", "chat": "b"}', ['both keys "prompt" and "chat"']),
        ('{"chat": ""}', ["its chat is empty"]),
        ('{"chat": 3}', ['"chat" is a number; expected a text']),
        ('{"chat": "a", "system": ["b"]}', ['"system" is an array; expected a text']),
        ('{"prompt": "a", "system": "b"}', ['"system" is about a chat; nearest: a key "chat"']),
        ('{"promt": "a"}', ["unknown key 'promt'", "nearest: prompt"]),
        ('{"prompt": "a", "temprature": 1}', ["unknown key 'temprature'", "nearest: temperature"]),
        ('{"prompt": "a", "prompt": "b"}', ["'prompt' is there twice"]),
        ('{"prompt": ""}', ["empty"]),
        ('{"prompt": null}', ["expected a text"]),
        ('{"prompt": ["a"]}', ["an array", "expected a text"]),
        ('{"prompt": "\\ud800"}', ["lone surrogate"]),
        ('{"prompt": "a", "temperature": NaN}', ["NaN is not JSON"]),
        ('{"prompt": "a", "temperature": -Infinity}', ["-Infinity is not JSON"]),
        ('{"prompt": "a", "temperature": 1e999}', ["temperature=inf is not allowed"]),
        ('{"prompt": "a", "temperature": -1}', ["temperature=-1.0 is not allowed", "nearest: 0"]),
        ('{"prompt": "a", "top_p": 3}', ["top_p=3.0 is not allowed", "nearest: 1"]),
        ('{"prompt": "a", "seed": "7"}', ['seed="7" is not allowed', "an integer"]),
        ('{"prompt": "a", "seed": true}', ["seed=true is not allowed"]),
        ('{"prompt": "a", "stop": ""}', ["stop[0]=''"]),
        ('{"prompt": "a", "stop": [3]}', ["stop[0]=3", "a text"]),
        ('{"prompt": "a", "seed": 1.0}', ["seed=1.0", "an integer"]),
        ('{"prompt": "a", "seed": null}', ["seed=null"]),
        ('{"prompt": "a", "temperature": "1"}', ['temperature="1"', "a number"]),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", ["temperature=1000"]),
        ('{"prompt": "a", "logit_bias": {"5": "x"}}', ['logit_bias[5]="x"']),
        ('{"prompt": "a", "stop_id": -1}', ["stop_id[0]=-1"]),
        ('{"prompt": "a", "logit_bias": 3}', ["logit_bias=3"]),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', ['logit_bias token="x"']),
        ('{"prompt": "a", "logit_bias": {"5": 1e9}}', ["logit_bias[5]"]),
        ('{"prompt": "a", "num_samples": 2, "temperature": 0}', ["num_samples=2", "temperature=0"]),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", ["not JSON"]),
        ("[" * 100_000, ["nested too deep"]),
        (b'{"prompt": "\xff"}', ["not UTF-8", "0xFF"]),
        ('{"prompt": "a"}'.encode("utf-16"), ["not UTF-8"]),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_its_fault(
    tmp_path: Path, line: bytes | str, parts: list[str]
) -> None:
    message = reason(tmp_path, line)
    assert "p.jsonl line 1: " in message
    assert all(part in message for part in parts), message
    assert len(message) < 500


def test_line_numbers_and_indices_count_what_is_skipped(tmp_path: Path) -> None:
    found = read(tmp_path, '\n{"prompt": "a"}\n\n{"prompt"\n  \n{"prompt": "b"}\n')
    assert [type(line) for line in found] == [Prompt, BadLine, Prompt]
    good = [line for line in found if isinstance(line, Prompt)]
    assert [prompt.index for prompt in good] == [0, 2]
    assert good[1].name.endswith("p.jsonl line 6")
    assert isinstance(found[1], BadLine)
    assert "line 4: " in found[1].reason


def test_the_first_bad_line_stops_all_and_the_others_are_counted(tmp_path: Path) -> None:
    found = read(tmp_path, '{"prompt": "a"}\n{}\n[]\n3\n')
    with pytest.raises(UserError, match=r"line 2: .*; 2 more bad; nothing ran; --skip_bad_lines"):
        keep_good(found)
    good = [line for line in found if isinstance(line, Prompt)]
    assert keep_good(good) == good


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UserError, match="no prompts in it"):
        read(tmp_path, data)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}")
    for path, words in (
        (tmp_path / "prompt.jsonl", "no such file; nearest: .*prompts.jsonl"),
        (tmp_path / "no" / "x", "no such file$"),
        (tmp_path, "a folder"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(UserError, match=words):
            read_prompts_file(path, FIELDS, sized=False, first=0)


def test_prompts_of_flags_are_named_by_their_number() -> None:
    (one,) = prompts_from_flags(["a"], FIELDS, sized=False)
    assert (one.name, one.skippable, one.index) == ("the prompt", False, 0)
    names = [prompt.name for prompt in prompts_from_flags(["a", "b"], FIELDS, sized=False)]
    assert names == ["prompt 1", "prompt 2"]
    for text, words in (
        ("", "prompt 2 is empty"),
        ("a\udcff", "prompt 2 is not UTF-8: byte 0xFF at position 1"),
    ):
        with pytest.raises(UserError, match=words):
            prompts_from_flags(["a", text], FIELDS, sized=False)


def flags_of(**values: Any) -> Flags:
    return Flags(values, frozenset(values))


def test_only_typed_flags_become_fields() -> None:
    assert fields_from_flags(flags_of()) == {}
    flags = flags_of(seed=3, stop=("a", "b"), stop_id=(4,), logit_bias=("5=-1.5", "6=-inf"), logprobs=0)
    assert fields_from_flags(flags) == {
        "seed": 3, "stop_strings": ("a", "b"), "stop_ids": (4,), "logprobs": 0,
        "logit_bias": {5: -1.5, 6: float("-inf")},
    }  # fmt: skip


@pytest.mark.parametrize("texts", [("5",), ("x=1",), ("5=x",), ("=",), ("1.5=2",)])
def test_a_bias_is_an_id_and_a_number(texts: Sequence[str]) -> None:
    with pytest.raises(UserError, match=r"--logit_bias=.* is not id=value"):
        fields_from_flags(flags_of(logit_bias=tuple(texts)))


def test_two_biases_of_one_token_are_refused() -> None:
    with pytest.raises(UserError, match="twice for token 5"):
        fields_from_flags(flags_of(logit_bias=("5=1", "05=2")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, "--temperature=-1.0 is not allowed"),
        ({"temperature": float("nan")}, "--temperature=nan is not allowed"),
        ({"top_p": 3.0}, r"--top_p=3.0 is not allowed; allowed: .*; nearest: 1.0"),
        ({"stop_strings": ("",)}, r"--stop\[0\]=''"),
        ({"stop_ids": (-1,)}, r"--stop_id\[0\]=-1"),
        ({"logprobs": 21}, "--logprobs=21"),
    ],
)
def test_a_refused_setting_has_the_name_that_was_typed(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        sampling_params(fields, "--")


def test_every_setting_of_sampling_has_a_flag_and_a_key() -> None:
    names = {option.name for option in sampling_group(SamplingParams()).options}
    fields = set(SamplingParams.__dataclass_fields__)
    assert names == (fields - {"stop_strings", "stop_ids"}) | {"stop", "stop_id"}
    texts = {"stop": "x", "logit_bias": {}}
    assert set(fields_from_line(dict.fromkeys(names, 1) | texts)) == fields


def test_the_help_of_sampling_says_the_defaults() -> None:
    shown = {option.name: option.default_words for option in sampling_group(SamplingParams(seed=5)).options}
    assert shown["seed"] == "5"
    assert shown["max_new_tokens"] == "128, or what the context leaves"
    assert shown["logprobs"] == "none"
    assert shown["stop"] == ""


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("top_k", (-1, 1), (0, -2)),
        ("top_p", (1.0, 1e-6), (0.0, 1.1)),
        ("min_p", (0.0, 1.0), (-0.1, 1.1)),
        ("repetition_penalty", (0.0001, 10000.0), (0.0, 10001.0)),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1)),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1)),
        ("seed", (0, 2**64 - 1), (-1, 2**64)),
        ("logprobs", (0, 20), (-1, 21)),
    ],
)
def test_the_ranges_that_the_help_gives_are_those_that_hold(
    name: str, allowed: tuple[float, ...], refused: tuple[float, ...]
) -> None:
    for value in allowed:
        sampling_params({name: value})
    for value in refused:
        with pytest.raises(UserError):
            sampling_params({name: value})
