"""Text to token ids and back, without loss where the model allows it.

Idea: a token is *bytes*, not text. A character may be cut over several tokens (byte pieces), so text only
exists once the bytes of all tokens stand in a row; both `decode` and the incremental detokenizer are
built on the bytes of one token. One more rule is needed: many sentencepiece models put a space before the
text when they encode and take it away again when they decode, so the first token of a text has bytes of
its own (`first_token_bytes`). The tokens of a completion continue the prompt's text and keep their space.

Data flow: text → `encode` → ids → model → ids → `token_bytes` → UTF-8 → text. Special tokens (BOS, EOS)
have no bytes; bytes that are not UTF-8 show as U+FFFD.

Worked example (`ByteTokenizer`): "né" → UTF-8 6E C3 A9 → ids [110, 195, 169]; decode([110, 195]) is
"n\\ufffd", for half a character is all there is; decode([256, 110, 195, 169, 257]) is "né".
"""

import abc
import operator
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, SupportsIndex, runtime_checkable

import sentencepiece

from inference_engine.sentencepiece_file import load_sentencepiece
from layers.errors import UserError

SPACE_MARK = "\u2581"  # sentencepiece writes a space inside a piece with this character
NUM_BYTES = 256


@runtime_checkable
class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a text, EOS among them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without BOS or EOS."""
        ...

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which the names of special tokens stand for them, as chat templates write it."""
        ...

    def decode(self, ids: Iterable[SupportsIndex], continues: bool = False) -> str:
        """Text of the ids; `continues` says that other text stands before them."""
        ...

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """UTF-8 bytes of a token inside a text; empty for special tokens."""
        ...

    def first_token_bytes(self, token_id: SupportsIndex) -> bytes | None:
        """Bytes of the token that opens a text; None if the next token opens it still."""
        ...


def check_text(text: str) -> None:
    """Raise `UserError` if the text holds a lone surrogate, which no UTF-8 can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise UserError(f"the text holds a lone surrogate ({found}); it must be valid Unicode") from error


def text_from_bytes(data: bytes, source: str) -> str:
    """Text of UTF-8 bytes that came from `source` (a file's name, "the prompt", ...).

    Raises:
      UserError: the bytes are not UTF-8; the first bad one is named with its position.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02X} at position {error.start}"
        raise UserError(f"{source} is not UTF-8: {found} ({error.reason}); convert it to UTF-8") from error


def check_ids(ids: Iterable[SupportsIndex], vocab_size: int) -> list[int]:
    """The ids as plain ints.

    Raises:
      UserError: an id lies outside 0 .. vocab_size - 1.
    """
    checked = [operator.index(token_id) for token_id in ids]
    for position, token_id in enumerate(checked):
        if not 0 <= token_id < vocab_size:
            raise UserError(
                f"token id {token_id} at position {position} is not in the vocabulary; "
                f"{_allowed_ids(vocab_size)}"
            )
    return checked


def _allowed_ids(vocab_size: int) -> str:
    return f"ids run from 0 to {vocab_size - 1}" if vocab_size else "it is empty"


def check_vocab_fits(tokenizer: Tokenizer, model_vocab: int) -> None:
    """Raise `UserError` if the tokenizer can make ids that the model has no embedding for."""
    if tokenizer.vocab_size > model_vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary only {model_vocab}; "
            f"use the tokenizer that the checkpoint was trained with (at most {model_vocab} ids)"
        )


class TokenTable(abc.ABC):
    """Decoding over two tables of bytes, shared by the tokenizers.

    `inside[i]` are the bytes of token i within a text, `opening[i]` those at its start (None: the token
    leaves the start where it is).
    """

    bos_id: int | None = None
    eos_id: int | None = None
    other_end_ids: frozenset[int] = frozenset()

    @property
    def end_ids(self) -> frozenset[int]:
        """See `Tokenizer.end_ids`."""
        return self.other_end_ids | (frozenset() if self.eos_id is None else frozenset({self.eos_id}))

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""

    def encode_marked(self, text: str) -> list[int]:
        """See `Tokenizer.encode_marked`: as `encode`, where special tokens have no names or it finds them."""
        return self.encode(text)

    def __init__(self, inside: Sequence[bytes], opening: Sequence[bytes | None]) -> None:
        self._inside = inside
        self._opening = opening
        self.vocab_size = len(inside)

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """See `Tokenizer.token_bytes`. Raises `UserError` for an id out of the vocabulary."""
        return self._inside[self._checked(token_id)]

    def first_token_bytes(self, token_id: SupportsIndex) -> bytes | None:
        """See `Tokenizer.first_token_bytes`. Raises `UserError` for an id out of the vocabulary."""
        return self._opening[self._checked(token_id)]

    def decode(self, ids: Iterable[SupportsIndex], continues: bool = False) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          UserError: an id is out of the vocabulary.
        """
        checked = check_ids(ids, self.vocab_size)
        parts: list[bytes] = []
        opened = continues
        for token_id in checked:
            data = self._inside[token_id] if opened else self._opening[token_id]
            if data is not None:
                parts.append(data)
                opened = True
        return b"".join(parts).decode("utf-8", "replace")

    def _checked(self, token_id: SupportsIndex) -> int:
        index = operator.index(token_id)
        if not 0 <= index < self.vocab_size:
            raise UserError(f"token id {index} is not in the vocabulary; {_allowed_ids(self.vocab_size)}")
        return index


class ByteTokenizer(TokenTable):
    """One id per byte, then BOS (256) and EOS (257); ids beyond stand for nothing. For tests.

    `vocab_size` may be larger than 258, so that it fits a model of any vocabulary.
    """

    bos_id: int | None = NUM_BYTES
    eos_id: int | None = NUM_BYTES + 1

    def __init__(self, vocab_size: int = NUM_BYTES + 2) -> None:
        smallest = NUM_BYTES + 2
        if vocab_size < smallest:
            raise UserError(
                f"a byte tokenizer needs a vocabulary of at least {smallest} ids, not {vocab_size}"
            )
        specials = vocab_size - NUM_BYTES
        one_byte = [bytes([value]) for value in range(NUM_BYTES)]
        super().__init__(one_byte + [b""] * specials, [*one_byte, *[None] * specials])

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text. Raises `UserError` for lone surrogates."""
        check_text(text)
        return list(text.encode("utf-8"))


class SentencePieceTokenizer(TokenTable):
    """A sentencepiece model file.

    `decode` shows what sentencepiece's own does (the space that encoding put first is dropped, an unknown
    token shows as " \\u2047 "), save that bytes which are not UTF-8 follow Python's "replace" rule.
    Text that the model's vocabulary lacks becomes bytes if the model has byte pieces, else unknown tokens.

    Args:
      path: the file.
      model: what was loaded from it, where it is not a sentencepiece file itself.

    Raises:
      UserError: the file is missing, empty, truncated or not a sentencepiece model.
    """

    def __init__(self, path: Path | str, model: sentencepiece.SentencePieceProcessor | None = None) -> None:
        self._model = load_sentencepiece(Path(path)) if model is None else model
        self.bos_id: int | None = _none_if_absent(self._model.bos_id())
        self.eos_id: int | None = _none_if_absent(self._model.eos_id())
        try:
            tables = _token_tables(self._model)
        except ValueError as error:  # a piece that is not UTF-8, a byte piece that names no byte
            raise UserError(f"the tokenizer {path} is damaged, get it again: {error}") from error
        super().__init__(*tables)
        self._mark_ids = _lossless_mark_ids(self._model)
        controls = (token for token in range(self.vocab_size) if self._model.is_control(token))
        self._controls = {self._model.id_to_piece(token): token for token in controls}

    def encode(self, text: str) -> list[int]:
        """Ids of the text. Raises `UserError` for lone surrogates."""
        check_text(text)
        if SPACE_MARK not in text or not self._mark_ids:
            return self._model.encode(text)
        first, *others = map(self._model.encode, text.split(SPACE_MARK))
        return first + [token_id for part in others for token_id in (*self._mark_ids, *part)]

    def encode_marked(self, text: str) -> list[int]:
        """Ids of the text, control pieces by their names. Raises `UserError` for lone surrogates."""
        if not self._controls:
            return self.encode(text)
        names = "|".join(sorted(map(re.escape, self._controls), key=len, reverse=True))
        parts = re.split(f"({names})", text)
        ids = ([self._controls[part]] if part in self._controls else self.encode(part) for part in parts)
        return [token_id for part in ids for token_id in part]


def _none_if_absent(special_id: int) -> int | None:
    return special_id if special_id >= 0 else None


def _token_tables(model: sentencepiece.SentencePieceProcessor) -> tuple[list[bytes], list[bytes | None]]:
    """Bytes of every id inside and at the start of a text."""
    drops_space, drops_every_space = _start_rule(model)
    inside: list[bytes] = []
    opening: list[bytes | None] = []
    for token_id in range(model.vocab_size()):
        piece = model.id_to_piece(token_id)
        data = _piece_bytes(model, token_id, piece)
        dropped = drops_space and piece.startswith(SPACE_MARK)
        first = data[1:] if dropped else data
        unopened = model.is_control(token_id) or (drops_every_space and not first)
        inside.append(data)
        opening.append(None if unopened else first)
    return inside, opening


def _piece_bytes(model: sentencepiece.SentencePieceProcessor, token_id: int, piece: str) -> bytes:
    if model.is_control(token_id):
        return b""
    if model.is_byte(token_id):
        return bytes([int(piece[3:5], 16)])  # written <0xNN>
    if model.is_unknown(token_id):
        return model.decode([token_id]).encode()
    return piece.replace(SPACE_MARK, " ").encode()


def _start_rule(model: sentencepiece.SentencePieceProcessor) -> tuple[bool, bool]:
    """Whether decoding drops a space from the first token, and whether it does so until there is text.

    The settings cannot be read through the public interface, so the model is asked what it does.
    """
    pieces = (model.id_to_piece(token_id) for token_id in range(model.vocab_size()))
    marked = next((piece for piece in pieces if piece.startswith(SPACE_MARK)), None)
    if marked is None:
        return False, False
    spelled = marked.replace(SPACE_MARK, " ")
    drops_space = model.decode_pieces([marked]) != spelled
    drops_every_space = drops_space and model.decode_pieces([SPACE_MARK, SPACE_MARK]) == ""
    return drops_space, drops_every_space


def _lossless_mark_ids(model: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Byte ids that spell U+2581, which encoding would take for a space; empty if it cannot be exact.

    A model that puts a space before the text would put one after every mark too, so its own reading stays.
    """
    ids = [model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
    exact = all(map(model.is_byte, ids)) and not any(_start_rule(model))
    return ids if exact else []
