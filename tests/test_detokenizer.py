"""The incremental text is the whole text, and a stop string is never seen."""

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import SupportsIndex

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference_engine.detokenizer import Detokenizer, StopStrings, TextStream
from inference_engine.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from layers.errors import UserError
from tests.sentencepiece_models import Spaces, write_model

DEFAULT_MODEL = Path(__file__).parent.parent / "checkpoints" / "default" / "tokenizer.model"
REPLACEMENT = "\ufffd"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# A negative number stands for the tokenizer's space, which is special at the start of a text.
IDS = st.lists(st.integers(-40, -1) | st.integers(0, 299), max_size=40)
# Few letters, so that stop strings occur, overlap and nearly occur.
LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    small = [SentencePieceTokenizer(write_model(folder / spaces.name, spaces)) for spaces in Spaces]
    return [ByteTokenizer(), SentencePieceTokenizer(DEFAULT_MODEL), *small]


def pieces_of(tokenizer: Tokenizer, ids: list[int], continues: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, continues)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@functools.cache
def space_id(tokenizer: Tokenizer) -> int:
    """The id of the space mark: the last token that is one space, for the byte 0x20 comes before."""
    return max(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" ")


def ids_within(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    """Any numbers as ids of this tokenizer."""
    space = space_id(tokenizer)
    return [space if number < 0 else number % tokenizer.vocab_size for number in numbers]


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow twin: the stop that ends first, the longest of those that end together."""
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@given(text=TEXT)
@settings(deadline=None)
def test_pieces_join_to_the_text(tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(numbers=IDS, continues=st.booleans())
@example(numbers=[0xF0, 0x9F, 0x98], continues=False)
@example(numbers=[0xE2, 0x82, 0x41], continues=False)
@example(numbers=[256, 256, 0xC3, 257, 0xA9], continues=True)
@example(numbers=[1, -1, -1, 100], continues=False)
@settings(deadline=None, max_examples=100)
def test_pieces_of_any_tokens_join_to_what_decode_says(
    tokenizers: list[Tokenizer], numbers: list[int], continues: bool
) -> None:
    for tokenizer in tokenizers:
        ids = ids_within(tokenizer, numbers)
        assert "".join(pieces_of(tokenizer, ids, continues)) == tokenizer.decode(ids, continues)


@given(text=TEXT.filter(lambda text: REPLACEMENT not in text))
@settings(deadline=None)
def test_no_piece_shows_half_a_character(tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in tokenizers:
        assert not any(REPLACEMENT in piece for piece in pieces_of(tokenizer, tokenizer.encode(text)))


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces_of(ByteTokenizer(), list("né😀!".encode())) == ["n", "", "é", "", "", "", "😀", "!", ""]


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    assert pieces_of(ByteTokenizer(), [110, 0xF0, 0x9F]) == ["n", "", "", REPLACEMENT]


def test_a_completion_keeps_the_space_that_a_text_loses(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(write_model(tmp_path / "m", Spaces.ONE_BEFORE))
    ids = tokenizer.encode("the cat")
    assert "".join(pieces_of(tokenizer, ids)) == "the cat"
    assert "".join(pieces_of(tokenizer, ids, continues=True)) == " the cat"


def test_ids_out_of_the_vocabulary_are_refused() -> None:
    for continues in (False, True):
        with pytest.raises(UserError, match="token id 258 is not in the vocabulary; ids run from 0 to 257"):
            Detokenizer(ByteTokenizer(), continues).push(258)


class CountingTokenizer(ByteTokenizer):
    """Counts how often it is asked for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        self.asked += 1
        return super().token_bytes(token_id)

    def decode(self, ids: Iterable[SupportsIndex], continues: bool = False) -> str:
        raise AssertionError("the whole text was decoded again")


def test_each_token_is_looked_at_once() -> None:
    tokenizer = CountingTokenizer()
    stream = TextStream(tokenizer, stops=["aaab"], continues=True)
    shown = [stream.push(97) for _ in range(1000)]
    assert tokenizer.asked == 1000
    assert shown == ["", "", ""] + ["a"] * 997


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
# After "baac" two shorter beginnings, "aa" and "a", must be given up before "c" is found.
@example(text="baacb", stops=["baacd", "aab", "cb"], cuts=[])
@settings(deadline=None, max_examples=300)
def test_stop_strings_cut_alike_wherever_the_text_is_divided(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    checker = StopStrings(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(checker.push(text[a:b]) for a, b in itertools.pairwise(edges))
    assert (shown + checker.flush(), checker.stopped_by) == cut_at_first_stop(text, stops)


@given(text=LETTERS, stops=STOPS)
@settings(deadline=None, max_examples=100)
def test_no_stop_string_and_no_beginning_of_one_is_shown_early(text: str, stops: list[str]) -> None:
    checker = StopStrings(stops)
    shown = ""
    for position, character in enumerate(text, start=1):
        shown += checker.push(character)
        assert not any(stop in shown for stop in stops)
        if checker.stopped_by is not None:
            break
        beginnings = [stop[:n] for stop in stops for n in range(len(stop))]
        held = max((len(b) for b in beginnings if text[:position].endswith(b)), default=0)
        assert shown == text[: position - held]


def test_stop_strings_worked_example() -> None:
    checker = StopStrings(["END", "\n\n"])
    assert [checker.push(text) for text in ("the E", "N", "V", "Y\n", "\nx")] == ["the ", "", "ENV", "Y", ""]
    assert checker.stopped_by == "\n\n"
    assert checker.push("more") == ""
    assert checker.flush() == ""


def test_the_stop_string_that_ends_first_wins() -> None:
    checker = StopStrings(["abcde", "bc"])
    assert (checker.push("abcde"), checker.stopped_by) == ("a", "bc")


def test_of_two_that_end_together_the_longest_wins() -> None:
    for stops in (["bc", "abc"], ["abc", "bc"]):
        checker = StopStrings(stops)
        assert (checker.push("xabc"), checker.stopped_by) == ("x", "abc")


def test_stop_strings_may_span_tokens_and_characters() -> None:
    stream = TextStream(ByteTokenizer(), stops=["né😀"])
    shown = [stream.push(byte) for byte in "un né né😀z".encode()]
    assert "".join(shown) + stream.flush() == "un né "
    assert stream.stopped_by == "né😀"


def test_what_was_held_back_is_shown_when_the_text_ends() -> None:
    stream = TextStream(ByteTokenizer(), stops=["END"])
    shown = "".join(stream.push(byte) for byte in b"the EN\xc3")
    assert shown == "the "
    assert stream.flush() == "EN" + REPLACEMENT
    assert stream.stopped_by is None


def test_a_stop_string_may_be_complete_only_at_the_end_of_the_text() -> None:
    stream = TextStream(ByteTokenizer(), stops=["N" + REPLACEMENT])
    assert "".join(stream.push(byte) for byte in b"the EN\xc3") == "the E"
    assert stream.flush() == ""
    assert stream.stopped_by == "N" + REPLACEMENT


def test_a_text_without_stop_strings_is_not_held_back() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push(byte) for byte in b"abc"] == ["a", "b", "c"]
    assert stream.flush() == ""


def test_impossible_stop_strings_are_refused() -> None:
    with pytest.raises(UserError, match="stop string 1 is empty"):
        StopStrings(["a", ""])
    with pytest.raises(UserError, match="lone surrogate"):
        StopStrings(["a\ud800"])
