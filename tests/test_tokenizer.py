"""Tokenizers: lossless where the model allows it, sentencepiece's own text otherwise, clear refusals."""

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_engine.tokenizer import (
    SPACE_MARK,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    check_ids,
    check_vocab_fits,
    text_from_bytes,
)
from layers.errors import UserError
from tests.sentencepiece_models import Spaces, write_model

DEFAULT_MODEL = Path(__file__).parent.parent / "checkpoints" / "default" / "tokenizer.model"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Characters that tokenizers stumble over: the space mark, joined emoji, NUL, line ends, special tokens.
AWKWARD = st.lists(
    st.sampled_from(
        [
            "the",
            " ",
            "  ",
            SPACE_MARK,
            "\n",
            "\r\n",
            "\0",
            "é",
            "👩‍👩‍👧",
            "<s>",
            "<0x0A>",
            "\ufeff",
            "e\u0301",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def default() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(DEFAULT_MODEL)


@pytest.fixture(scope="module", params=list(Spaces), ids=lambda spaces: spaces.name.lower())
def small_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "small.model", request.param)


def test_byte_tokenizer_worked_example() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.decode([110, 195]) == "n\ufffd"
    assert tokenizer.decode([256, 110, 195, 169, 257]) == "né"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)


def test_byte_tokenizer_can_fill_any_vocabulary() -> None:
    tokenizer = ByteTokenizer(272)
    assert tokenizer.decode([104, 271, 105]) == "hi"
    with pytest.raises(UserError, match="at least 258 ids, not 257"):
        ByteTokenizer(257)


@given(text=TEXT | AWKWARD)
@settings(deadline=None)
def test_byte_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXT | AWKWARD)
@settings(deadline=None, max_examples=100)
def test_default_tokenizer_gives_any_text_back(default: SentencePieceTokenizer, text: str) -> None:
    ids = default.encode(text)
    assert default.decode(ids) == text
    assert not {default.bos_id, default.eos_id, 0} & set(ids)


def test_default_tokenizer_splits_speeches_from_lines(default: SentencePieceTokenizer) -> None:
    assert default.vocab_size == 2048
    assert (default.bos_id, default.eos_id) == (1, 2)
    assert default.decode([3]) == "\n\n"
    assert default.decode([4]) == "\n"
    assert sorted(default.encode("\n\n\n")) == [3, 4]


def test_encoding_agrees_with_sentencepiece(small_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(small_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(small_model))
    for text in ("the cat", " the  cat ", "", "\nthe\n", "zürich"):
        assert tokenizer.encode(text) == reference.encode(text)


def test_decoding_any_tokens_agrees_with_sentencepiece(small_model: Path, rng: np.random.Generator) -> None:
    tokenizer = SentencePieceTokenizer(small_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(small_model))
    space = reference.piece_to_id(SPACE_MARK)
    ascii_bytes = [reference.piece_to_id(f"<0x{byte:02X}>") for byte in (32, 65, 10)]
    whole = [i for i in range(reference.vocab_size()) if not reference.is_byte(i)]
    alphabet = np.array([*whole, *ascii_bytes, *[space] * 10, 0, 1, 2, 0, 1, 2])
    for _ in range(300):
        ids = rng.choice(alphabet, size=rng.integers(0, 6)).tolist()
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_a_continuation_keeps_its_leading_space(small_model: Path, rng: np.random.Generator) -> None:
    tokenizer = SentencePieceTokenizer(small_model)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(small_model))
    before, space = reference.encode("a"), reference.piece_to_id(SPACE_MARK)
    assert tokenizer.decode([space], continues=True) == " "
    for _ in range(50):
        after = rng.choice([space, *range(tokenizer.vocab_size)], size=4).tolist()
        assert tokenizer.decode(before + after) == "a" + tokenizer.decode(after, continues=True)


def test_characters_without_bytes_become_the_unknown_token(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(write_model(tmp_path / "m", Spaces.KEPT, byte_fallback=False))
    assert 0 in tokenizer.encode("the ☃")
    assert "\u2047" in tokenizer.decode(tokenizer.encode("the ☃"))
    assert tokenizer.decode(tokenizer.encode("the" + SPACE_MARK + "cat")) == "the cat"


@pytest.mark.parametrize("bad", [-1, 258, 10**9])
def test_ids_out_of_the_vocabulary_are_named(bad: int) -> None:
    tokenizer = ByteTokenizer()
    message = f"token id {bad} at position 2 is not in the vocabulary; ids run from 0 to 257"
    with pytest.raises(UserError, match=message):
        tokenizer.decode([1, 2, bad])
    with pytest.raises(UserError, match=message):
        check_ids(np.array([1, 2, bad]), 258)
    with pytest.raises(UserError, match=f"token id {bad} is not"):
        tokenizer.token_bytes(bad)
    with pytest.raises(UserError, match=f"token id {bad} is not"):
        tokenizer.first_token_bytes(bad)


def test_checked_ids_are_plain_ints() -> None:
    assert all(type(token_id) is int for token_id in check_ids(np.array([3, 4], np.int32), 5))
    with pytest.raises(UserError, match=r"token id 0 at position 0 is not in the vocabulary; it is empty$"):
        check_ids([0], 0)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SentencePieceTokenizer(DEFAULT_MODEL)])
def test_lone_surrogates_are_refused_with_their_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"lone surrogate \(U\+D83D at character 3\)"):
        tokenizer.encode("abc\ud83d")


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    assert text_from_bytes("né\0".encode(), "the prompt") == "né\0"
    with pytest.raises(UserError, match=r"p\.txt is not UTF-8: byte 0xE9 at position 1"):
        text_from_bytes(b"n\xe9e", "p.txt")
    with pytest.raises(UserError, match=r"byte 0xC3 at position 1 \(unexpected end of data\)"):
        text_from_bytes(b"n\xc3", "p.txt")


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    check_vocab_fits(ByteTokenizer(), 258)
    with pytest.raises(UserError, match="has 258 ids, the model's vocabulary only 257"):
        check_vocab_fits(ByteTokenizer(), 257)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.model: No such file"):
        SentencePieceTokenizer(tmp_path / "no.model")
    with pytest.raises(UserError, match="Is a directory"):
        SentencePieceTokenizer(tmp_path)


def test_an_empty_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.model"
    path.touch()
    with pytest.raises(UserError, match=r"empty.model is empty \(0 bytes\)"):
        SentencePieceTokenizer(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = DEFAULT_MODEL.read_bytes()
    path = tmp_path / "cut.model"
    # 70 and 31608 lie between two fields, where sentencepiece itself loads what is left.
    for length in (1, 70, 5000, len(data) // 2, 31608, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(UserError, match=rf"cut\.model \({length} bytes\) .* is cut short"):
            SentencePieceTokenizer(path)


@pytest.mark.parametrize(
    "data",
    [b"hello world\n" * 9, b"\0" * 99, b"\xff" * 99, b"PK\x03\x04" + bytes(60), b"\n\0\x12\0\x1a\0"],
    ids=["text", "zeros", "ones", "zip", "fields_without_content"],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.model"
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a whole sentencepiece model") as refusal:
        SentencePieceTokenizer(path)
    assert "\n" not in str(refusal.value)


def test_damaged_bytes_never_escape_as_another_error(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "damaged.model"
    for _ in range(15):
        data = np.frombuffer(DEFAULT_MODEL.read_bytes(), np.uint8).copy()
        data[rng.integers(0, data.size, 3)] ^= rng.integers(1, 256, 3, dtype=np.uint8)
        path.write_bytes(data.tobytes())
        try:
            tokenizer = SentencePieceTokenizer(path)
        except UserError:
            continue
        tokenizer.decode(tokenizer.encode("the cat"))
