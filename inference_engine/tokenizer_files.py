"""From a tokenizer's path to a tokenizer, and to the chat template that comes with it.

Kinds are told by content: GGUF, JSON, else sentencepiece. Files beside it say what it does not: BOS
(`tokenizer_config.json`), which ids end a text (`generation_config.json`, else `config.json`, else the
tokenizer's own EOS), and the chat template (`chat_template.jinja`, else `tokenizer_config.json`).

Data flow: path → `open_tokenizer`, `open_chat_template`.

Worked example: Llama 3's generation_config.json has eos_token_id [128001, 128009]: both end a text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.files import check_inside, read_json_object
from checkpoints.gguf_header import MAGIC, read_header
from inference_engine.chat_template import ChatTemplate
from inference_engine.gguf_tokenizer import gguf_tokenizer
from inference_engine.json_tokenizer import JsonTokenizer
from inference_engine.tokenizer import SentencePieceTokenizer, TokenTable, check_ids
from layers.errors import UserError

TOKENIZER_CONFIG, GENERATION_CONFIG, MODEL_CONFIG = (
    "tokenizer_config.json", "generation_config.json", "config.json",
)  # fmt: skip
TEMPLATE_FILE = "chat_template.jinja"
COMPANIONS = (TOKENIZER_CONFIG, GENERATION_CONFIG, MODEL_CONFIG, TEMPLATE_FILE)
"""What may stand beside a tokenizer's file and belongs to it."""
_MAX_JSON, _MAX_TEMPLATE = 1 << 28, 1 << 20


def open_tokenizer(path: Path) -> TokenTable:
    """The tokenizer in a file.

    Raises UserError naming the file: missing, damaged, of another kind, or naming ids that it does not have.
    """
    head = _head(path)
    if head.startswith(MAGIC):
        return gguf_tokenizer(read_header(path).metadata, path)
    if not head.lstrip().startswith(b"{"):
        tokenizer: TokenTable = SentencePieceTokenizer(path)
        _apply_config(tokenizer, path.parent, None)
        return tokenizer
    read_json_object(path, _MAX_JSON)  # says what is wrong with it
    json_tokenizer = JsonTokenizer(path.read_text(encoding="utf-8"), str(path))
    _apply_config(json_tokenizer, path.parent, json_tokenizer)
    return json_tokenizer


def open_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template that comes with the tokenizer at a path; None where there is none."""
    if _head(path).startswith(MAGIC):
        metadata = read_header(path).metadata
        text, tokens = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens", [])
        if not isinstance(text, str):
            return None
        ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        names = (tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else "" for i in ids)
        return ChatTemplate(str(path), text, *names)
    config = _optional(path.parent / TOKENIZER_CONFIG)
    file = path.parent / TEMPLATE_FILE
    text = _template_text(file) if file.is_file() else _default_template(config.get("chat_template"))
    if text is None:
        return None
    return ChatTemplate(str(path.parent), text, _name(config, "bos_token"), _name(config, "eos_token"))


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(64)
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error.strerror}; give a sentencepiece model, "
            "a tokenizer.json or a GGUF file"
        ) from None


def _apply_config(tokenizer: TokenTable, folder: Path, named: JsonTokenizer | None) -> None:
    """BOS and the ends of a text, as the files beside a tokenizer say."""
    config = _optional(folder / TOKENIZER_CONFIG)
    adds_bos = config.get("add_bos_token")
    if adds_bos is False:
        tokenizer.bos_id = None
    elif adds_bos is True and named is not None:
        tokenizer.bos_id = named.token_id(_name(config, "bos_token"))
    for file in (GENERATION_CONFIG, MODEL_CONFIG):
        ends = _optional(folder / file).get("eos_token_id")
        if ends is not None:
            checked = _end_ids(ends, folder / file, tokenizer.vocab_size)
            tokenizer.eos_id, tokenizer.other_end_ids = checked[0], frozenset(checked[1:])
            return
    end = None if named is None else named.token_id(_name(config, "eos_token"))
    if end is not None:
        tokenizer.eos_id = end


def _end_ids(ends: Any, file: Path, vocab_size: int) -> list[int]:
    """The ids of a file's `eos_token_id`, one at least. Raises UserError naming file and key."""
    listed = ends if isinstance(ends, list) else [ends]
    if not listed or not all(isinstance(end, int) and not isinstance(end, bool) for end in listed):
        raise UserError(f"{file}: eos_token_id is {ends!r:.60}, expected an id or a list of ids")
    try:
        return check_ids(listed, vocab_size)
    except UserError as error:
        raise UserError(f"{file}: eos_token_id: {error}") from None


def _optional(path: Path) -> Mapping[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    check_inside(path)
    return read_json_object(path)


def _name(config: Mapping[str, Any], key: str) -> str:
    """A special token's name; it stands alone or in an object."""
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _default_template(value: Any) -> str | None:
    """The template of a tokenizer's config: a text, or the one named "default" of several."""
    if isinstance(value, list):
        found = (
            item.get("template") for item in value if isinstance(item, dict) and item.get("name") == "default"
        )
        value = next(found, None)
    return value if isinstance(value, str) else None


def _template_text(path: Path) -> str:
    check_inside(path)
    try:
        if path.stat().st_size > _MAX_TEMPLATE:
            raise UserError(f"{path}: more than {_MAX_TEMPLATE:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
