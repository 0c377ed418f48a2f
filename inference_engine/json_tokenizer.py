"""Tokenizers of `tokenizer.json` files, through the package `tokenizers`.

Encoding is the package's. Decoding is by bytes, as everywhere here: the file's decoder says how a token is
spelled (a byte for a character, or pieces with marked spaces and byte pieces) and what the first token of a
text loses. Decoders of other kinds are refused. The file's settings for cutting and padding are for batches
in training and are put aside.

Data flow: JSON text → `tokenizers.Tokenizer` and two tables of bytes → `JsonTokenizer`.

Worked example: byte-level "Ġthe" is b" the"; with marked spaces "▁the" is b" the" inside a text and b"the" at
its start, and "<0xC3>" is b"\\xc3".
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inference_engine.tokenizer import NUM_BYTES, SPACE_MARK, TokenTable, check_text
from layers.errors import UserError

if TYPE_CHECKING:
    import tokenizers

Spelling = Callable[[str], tuple[bytes, bytes]]
"""A token's bytes inside a text and at its start."""
_MOST_HOLES = 1 << 20  # ids that a file may leave out; the tables have a row for each
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer(TokenTable):
    """A tokenizer of the package `tokenizers`.

    BOS is what the file's post-processor puts before a text; EOS and other ends are set by `tokenizer_files`,
    since this file does not say them.

    Raises:
      UserError: the text is no tokenizer or one that cannot encode, its decoder is of an unknown kind, its
        ids are far more than its tokens, or it puts more than one token around a text.
    """

    def __init__(self, text: str, source: str) -> None:
        self._source, self._model = source, _load(text, source)
        fields = json.loads(text)
        spell = _spelling(fields.get("decoder"), source)
        vocab: Mapping[str, int] = self._model.get_vocab(with_added_tokens=True)
        special = {token["id"] for token in fields.get("added_tokens") or () if token.get("special")}
        size = _table_size(vocab, source)
        inside: list[bytes] = [b""] * size
        opening: list[bytes | None] = [None] * size
        for token, token_id in vocab.items():
            if token_id not in special:
                inside[token_id], opening[token_id] = spell(token)
        super().__init__(inside, opening)
        self.bos_id = self._start_token()

    def encode(self, text: str) -> list[int]:
        """Ids of the text. Raises `UserError` for lone surrogates and for text that it has no ids for."""
        return self._encode(text, marks=False)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name."""
        found: int | None = self._model.token_to_id(token)
        return found

    def _start_token(self) -> int | None:
        """What is put before a text."""
        plain = self.encode("a")
        around = self._encode("a", marks=True)
        before = around[: len(around) - len(plain)]
        if around[len(before) :] != plain or len(before) > 1:
            raise UserError(
                f"{self._source}: it puts {len(around) - len(plain)} tokens around a text; "
                "supported: one before it, or none"
            )
        return before[0] if before else None

    def _encode(self, text: str, *, marks: bool) -> list[int]:
        """Ids of the text, with what the file puts around it if `marks`."""
        check_text(text)
        shown = repr(text[:20]) + ("…" if len(text) > 20 else "")
        with _one_line(f"{self._source}: it cannot encode the text {shown}"):
            encoding = self._model.encode(text, add_special_tokens=marks)
        return list(encoding.ids)


def _table_size(vocab: Mapping[str, int], source: str) -> int:
    """Ids of a vocabulary, those left out included. Raises UserError where these are too many to be meant."""
    last = max(vocab.values(), default=-1)
    if last >= len(vocab) + _MOST_HOLES:
        raise UserError(
            f"{source}: it has the id {last} for {len(vocab)} tokens; "
            f"allowed: ids below {len(vocab) + _MOST_HOLES} (the tokens and {_MOST_HOLES:,} ids left out)"
        )
    return last + 1


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Makes one line of what the package raises: exceptions of no narrower kind, and panics.

    A panic is no `Exception` and its class cannot be imported, so it is told by its name.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0][:120]
        raise UserError(f"{what} ({reason})") from None


def _load(text: str, source: str) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"{source}: reading it needs the package tokenizers; pip install 'palm-inference[hf]'"
        ) from None
    with _one_line(f"{source}: not a tokenizer"):
        model = tokenizers.Tokenizer.from_str(text)
    model.no_truncation()
    model.no_padding()
    return model


def _spelling(decoder: Any, source: str) -> Spelling:
    """How tokens are spelled, by the file's decoder. Raises UserError for one of another kind."""
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if kinds == ["ByteLevel"]:
        return byte_level_spelling
    if kinds == ["Metaspace"]:
        return _Marked(drops_first=parts[0].get("prepend_scheme", "always") != "never", every_mark=True)
    if (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and kinds[3:] in ([], ["Strip"])
        and _is_mark(parts[0])
    ):
        strip = parts[3] if kinds[3:] else {"content": " ", "start": 0, "stop": 0}
        if strip.get("content") == " " and strip.get("start") in (0, 1) and strip.get("stop") == 0:
            return _Marked(drops_first=strip["start"] == 1, every_mark=False)
    raise UserError(
        f"{source}: its decoder ({', '.join(map(str, kinds)) or 'none'}) is not supported; supported: "
        "ByteLevel, Metaspace, and marked spaces with byte pieces"
    )


def _is_mark(replace: Mapping[str, Any]) -> bool:
    return replace.get("pattern") == {"String": SPACE_MARK} and replace.get("content") == " "


class _Marked:
    """Pieces with marked spaces."""

    def __init__(self, *, drops_first: bool, every_mark: bool) -> None:
        self._drops_first, self._every_mark = drops_first, every_mark

    def __call__(self, token: str) -> tuple[bytes, bytes]:
        byte = _BYTE_PIECE.fullmatch(token)
        if byte is not None and not self._every_mark:
            value = bytes([int(byte[1], 16)])
            return value, value
        text = token.replace(SPACE_MARK, " ")
        first = text
        if self._drops_first:
            first = token.replace(SPACE_MARK, "") if self._every_mark else text.removeprefix(" ")
        return text.encode(), first.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, NUM_BYTES)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(NUM_BYTES + n): byte for n, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def byte_level_spelling(token: str) -> tuple[bytes, bytes]:
    """Bytes of a byte-level token; one with other characters is text (an added token)."""
    known = all(character in _ALPHABET for character in token)
    data = bytes(_ALPHABET[character] for character in token) if known else token.encode()
    return data, data
