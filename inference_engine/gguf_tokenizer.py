"""The tokenizer inside a GGUF file, as one of the two that it is: sentencepiece or byte-level BPE.

"llama" vocabularies are sentencepiece models taken apart: pieces, scores and types. They are put together
again as the protocol-buffer message that sentencepiece reads. "gpt2" ones are byte-level BPE with merges and
a named way to split text before them, which becomes a `tokenizer.json`.

Data flow: metadata → model message or JSON → `SentencePieceTokenizer` or `JsonTokenizer`, with BOS and EOS as
the metadata says.

Worked example: SmolLM2 says model "gpt2", pre "smollm", bos 1, eos 2, add_bos_token false: nothing is put
before a text, and 2 (`<|im_end|>`) ends one.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from inference_engine.json_tokenizer import JsonTokenizer
from inference_engine.tokenizer import SentencePieceTokenizer, TokenTable
from layers.errors import UserError

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_TOKEN_TYPES = range(1, 7)  # of GGUF, and of sentencepiece
_GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is split before merging, by the name in `tokenizer.ggml.pre`.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (_GPT2_SPLIT,),
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama3": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
}
_ADDS_BOS = ("llama-bpe", "llama3")


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> TokenTable:
    """The tokenizer that a GGUF file's metadata describes.

    Raises UserError naming the key: none, of another kind, or damaged.
    """
    fields = _Fields(metadata, path)
    kind = fields.text("model")
    if kind not in _BUILDERS:
        raise UserError(
            f"{path}: the tokenizer kind {kind[:40]!r} is not supported; supported: {', '.join(_BUILDERS)}"
        )
    tokenizer, adds_bos = _BUILDERS[kind](fields)
    size = len(fields.tokens)
    adds_bos = fields.flag("add_bos_token", adds_bos)
    tokenizer.bos_id = fields.token_id("bos_token_id", size) if adds_bos else None
    tokenizer.eos_id = fields.token_id("eos_token_id", size)
    ends = (fields.token_id(name, size) for name in ("eot_token_id", "eom_token_id"))
    tokenizer.other_end_ids = frozenset(end for end in ends if end is not None)
    return tokenizer


class _Fields:
    """The tokenizer's metadata, checked as it is read."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.path, self._metadata = path, metadata
        self.tokens: Sequence[str] = self.list("tokens", str)
        self.types: Sequence[int] = self.list("token_type", int, [1] * len(self.tokens))
        if len(self.types) != len(self.tokens) or not set(self.types) <= {0, *_TOKEN_TYPES}:
            raise UserError(f"{path}: {_PREFIX}token_type does not fit {len(self.tokens)} tokens")

    def list(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise UserError(f"{self.path}: no list {_PREFIX}{name} of the expected kind")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, str):
            raise UserError(f"{self.path}: no text {_PREFIX}{name}; it has no tokenizer that can be read")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {_PREFIX}{name} is {value!r:.40}, expected true or false")
        return value

    def token_id(self, name: str, size: int) -> int | None:
        """A token's id, None where the file names none."""
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < size:
            raise UserError(f"{self.path}: {_PREFIX}{name} is {value!r:.40}, expected an id below {size}")
        return value


def _byte_level(fields: _Fields) -> tuple[TokenTable, bool]:
    """Byte-level BPE."""
    pre = fields.text("pre", "default")
    if pre not in _SPLITS:
        raise UserError(
            f"{fields.path}: text split {pre[:40]!r} is not supported; supported: {', '.join(_SPLITS)}"
        )
    vocab = {token: token_id for token_id, token in enumerate(fields.tokens)}
    if len(vocab) < len(fields.tokens):
        raise UserError(f"{fields.path}: {_PREFIX}tokens has a token twice")
    merges = [merge.split(" ") for merge in fields.list("merges", str)]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [split | {"pattern": {"Regex": pattern}} for pattern in _SPLITS[pre]]
    added = [
        {"id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == _CONTROL}
        for token_id, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    text = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": pre in _ADDS_BOS},
    }
    return JsonTokenizer(json.dumps(text), str(fields.path)), pre in _ADDS_BOS


def _sentencepiece(fields: _Fields) -> tuple[TokenTable, bool]:
    """A sentencepiece model put together again."""
    scores = fields.list("scores", float)
    if len(scores) != len(fields.tokens):
        raise UserError(f"{fields.path}: {len(scores)} scores for {len(fields.tokens)} tokens")
    pieces = b"".join(
        _message(1, _message(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(fields.tokens, scores, fields.types, strict=True)
    )
    size = len(fields.tokens)
    trainer = _number(3, 2) + _number(4, size) + _number(35, 1)  # BPE, size, bytes for what is unknown
    for field, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        found = fields.token_id(f"{name}_token_id", size)
        trainer += _number(field, -1 if found is None else found)
    prefix = fields.flag("add_space_prefix", True)
    normalizer = _message(1, b"identity") + _number(3, prefix) + _number(4, 0) + _number(5, 1)
    try:
        model = sentencepiece.SentencePieceProcessor(
            model_proto=pieces + _message(2, trainer) + _message(3, normalizer)
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0][:120]
        raise UserError(f"{fields.path}: its tokenizer is damaged ({reason})") from None
    return SentencePieceTokenizer(fields.path, model), True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _message(field: int, content: bytes) -> bytes:
    """A protocol-buffer field of bytes."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    """A protocol-buffer field of an integer; negative ones take ten bytes."""
    return _varint(field << 3) + _varint(int(value) % (1 << 64))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out + bytes([value]))
