"""Read a sentencepiece model file, or say in one line why it cannot be one.

Idea: sentencepiece checks that the bytes parse, not that they are all there. Its file is a protocol-buffer
message, a row of (field, length, bytes); a file cut between two fields parses, and then loads with other
settings (another normalisation, other pieces). So the fields are walked first.

Worked example: 31,626 bytes hold 2,048 fields 1 (pieces), a field 2 (trainer settings) and, in the last
18 bytes, a field 3 (normalizer settings). Cut to 31,608 bytes, sentencepiece loads them all the same.
"""

from pathlib import Path

import sentencepiece

from layers.errors import UserError

# Top-level fields of a serialized sentencepiece model; every trainer writes these three.
_MODEL_FIELDS = {1: "pieces", 2: "trainer settings", 3: "normalizer settings"}
# Protocol-buffer wire types of fixed width, in bytes.
_FIXED_WIDTHS = {1: 8, 5: 4}
_VARINT, _LENGTH_DELIMITED = 0, 2
_LONGEST_VARINT = 10


def load_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    """The model in the file at `path`.

    Raises:
      UserError: the file is missing, empty, truncated or not a sentencepiece model.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error.strerror}; give a sentencepiece model file"
        ) from error
    if not data:
        raise UserError(f"the tokenizer {path} is empty (0 bytes); give a sentencepiece model file")
    missing = _MODEL_FIELDS.keys() - _top_level_fields(data)
    refusal = f"the tokenizer {path} ({len(data)} bytes) is not a whole sentencepiece model"
    if missing:
        raise UserError(
            f"{refusal}: no {_MODEL_FIELDS[min(missing)]} in it; it is cut short or another kind of file"
        )
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, ValueError) as error:  # ValueError: its own message is not UTF-8
        reason = str(error).splitlines()[0]
        raise UserError(f"{refusal}: {reason}") from error


def _top_level_fields(data: bytes) -> set[int]:
    """Numbers of the fields of a serialized protocol-buffer message; empty if it ends within a field."""
    fields: set[int] = set()
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type == _LENGTH_DELIMITED:
            length, position = _read_varint(data, position)
            position += length
        elif wire_type in _FIXED_WIDTHS:
            position += _FIXED_WIDTHS[wire_type]
        else:
            return set()
        fields.add(tag >> 3)
    return fields if position == len(data) else set()


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Value and the position after it; beyond the data if the value does not end."""
    value = 0
    for shift, byte in enumerate(data[position : position + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    return value, len(data) + 1
