"""Tokenizers of other projects: the package's ids and text, BOS and ends as the files say, clear refusals.

Idea: small tokenizers are trained with the packages themselves. Decoding by bytes, token by token, has to be
the package's own decoding; a sentencepiece model taken apart into GGUF's lists has to encode as before.

Data flow: trained tokenizer → `tokenizer.json`, GGUF metadata → `open_tokenizer` → ids, bytes, text.

Worked example: generation_config.json with eos_token_id [5, 6] makes both 5 and 6 end a text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from inference_engine.chat_template import ChatTemplate
from inference_engine.detokenizer import Detokenizer
from inference_engine.gguf_tokenizer import gguf_tokenizer
from inference_engine.json_tokenizer import JsonTokenizer
from inference_engine.tokenizer import NUM_BYTES, SPACE_MARK, SentencePieceTokenizer
from inference_engine.tokenizer_files import open_chat_template, open_tokenizer
from layers.errors import UserError
from tests.extras import NEEDS_GGUF, NEEDS_TOKENIZERS
from tests.gguf_files import write_gguf
from tests.sentencepiece_models import LINES

pytestmark = NEEDS_TOKENIZERS
TEXTS = (
    "the cat sat on the mat", "  two spaces, né and 2024\n\n\tthen", "日本語 and 👩‍👩‍👧", "a", " ",
    "It's 12345!", "<|end|> inside", f"{SPACE_MARK}marked",
)  # fmt: skip
MARKS = ["<|start|>", "<|end|>"]


def byte_level() -> str:
    """A byte-level BPE with two special tokens, as JSON text."""
    import tokenizers as tk

    model = tk.Tokenizer(tk.models.BPE())
    model.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=320, special_tokens=MARKS, show_progress=False,
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(LINES * 4, trainer)
    model.add_tokens(["<tool>"])
    return model.to_str()


def marked_spaces(decoder: str = "sequence") -> str:
    """A BPE with marked spaces and byte pieces, as Llama 2's, or with a Metaspace decoder."""
    import tokenizers as tk

    bytes_ = [f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]
    model = tk.Tokenizer(tk.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if decoder == "sequence":
        model.normalizer = tk.normalizers.Sequence(
            [tk.normalizers.Prepend(SPACE_MARK), tk.normalizers.Replace(" ", SPACE_MARK)]
        )
        model.decoder = tk.decoders.Sequence(
            [tk.decoders.Replace(SPACE_MARK, " "), tk.decoders.ByteFallback(), tk.decoders.Fuse(),
             tk.decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
    else:
        model.pre_tokenizer = tk.pre_tokenizers.Metaspace(prepend_scheme="always")
        model.decoder = tk.decoders.Metaspace(prepend_scheme="always")
    trainer = tk.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *MARKS, *bytes_], show_progress=False
    )
    model.train_from_iterator(LINES * 4, trainer)
    fields = json.loads(model.to_str())
    # Byte pieces are ordinary tokens in such files.
    fields["added_tokens"] = [t for t in fields["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(fields)


KINDS: dict[str, Callable[[], str]] = {
    "byte level": byte_level,
    "marked spaces": marked_spaces,
    "metaspace": lambda: marked_spaces("metaspace"),
}


@pytest.fixture(scope="module", params=KINDS)
def text(request: pytest.FixtureRequest) -> str:
    return KINDS[request.param]()


def test_ids_and_text_are_the_package_s_own(text: str, rng: np.random.Generator) -> None:
    import tokenizers as tk

    package, ours = tk.Tokenizer.from_str(text), JsonTokenizer(text, "here")
    assert ours.vocab_size == package.get_vocab_size()
    for sample in TEXTS:
        ids = ours.encode(sample)
        assert ids == package.encode(sample, add_special_tokens=False).ids
        assert ours.decode(ids) == package.decode(ids)
    pieces = [ours.encode(word)[-1] for word in ["the", "cat", "sat", "plan", "question", "rain"]]
    for _ in range(50):
        ids = rng.choice(pieces, 6).tolist()
        assert ours.decode(ids) == package.decode(ids)


def test_streamed_text_is_the_text(text: str) -> None:
    tokenizer = JsonTokenizer(text, "here")
    for sample in TEXTS:
        ids = tokenizer.encode(sample)
        stream = Detokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_byte_level_text_survives_whatever_it_is() -> None:
    tokenizer = JsonTokenizer(byte_level(), "here")
    for sample in TEXTS[:6]:
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert tokenizer.decode(tokenizer.encode("a<|end|>b<tool>c")) == "ab<tool>c"  # special ones are not shown


def with_prefix(text: str, template: list[dict[str, Any]]) -> str:
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    specials = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in MARKS}
    processor = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": specials}
    return json.dumps(json.loads(text) | {"post_processor": processor})


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
START, END = ({"SpecialToken": {"id": name, "type_id": 0}} for name in MARKS)


def saved(folder: Path, text: str, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(text)
    return folder / "tokenizer.json"


def test_bos_is_what_the_file_puts_before_a_text(tmp_path: Path) -> None:
    plain, prefixed = byte_level(), with_prefix(byte_level(), [START, SEQUENCE])
    assert open_tokenizer(saved(tmp_path, plain)).bos_id is None
    assert open_tokenizer(saved(tmp_path, prefixed)).bos_id == 0
    off, on = {"add_bos_token": False}, {"add_bos_token": True, "bos_token": {"content": "<|end|>"}}
    assert open_tokenizer(saved(tmp_path, prefixed, tokenizer_config=off)).bos_id is None
    assert open_tokenizer(saved(tmp_path, plain, tokenizer_config=on)).bos_id == 1
    with pytest.raises(UserError, match="puts 2 tokens around a text"):
        open_tokenizer(saved(tmp_path, with_prefix(plain, [START, SEQUENCE, END])))


def test_a_text_ends_where_the_files_say(tmp_path: Path) -> None:
    text, config = byte_level(), {"eos_token": "<|end|>"}
    assert open_tokenizer(saved(tmp_path, text)).end_ids == frozenset()
    assert open_tokenizer(saved(tmp_path, text, tokenizer_config=config)).end_ids == {1}
    assert open_tokenizer(saved(tmp_path, text, config={"eos_token_id": 5})).end_ids == {5}
    several = open_tokenizer(saved(tmp_path, text, generation_config={"eos_token_id": [6, 7]}))
    assert several.end_ids == {6, 7}
    assert several.eos_id == 6
    for name in ("generation_config", "config"):
        folder = tmp_path / name
        for bad in (9999, -1, [3, 9999]):
            path = saved(folder, text, **{name: {"eos_token_id": bad}})
            with pytest.raises(
                UserError, match=r"token id (9999|-1) at position \d is not in the voc"
            ) as error:
                open_tokenizer(path)
            assert str(error.value).startswith(f"{folder / name}.json: eos_token_id: ")
    with pytest.raises(UserError, match="eos_token_id is 'x', expected an id or a list of ids"):
        open_tokenizer(saved(tmp_path, text, generation_config={"eos_token_id": "x"}))


WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
BAD_JSON: dict[str, tuple[Callable[[dict], object], str]] = {
    "decoder": (lambda t: t | {"decoder": WORD_PIECE}, "its decoder (WordPiece) is not supported"),
    "no decoder": (lambda t: t | {"decoder": None}, "its decoder (none) is not supported"),
    "model": (lambda t: t | {"model": {"type": "Unknown"}}, "not a tokenizer ("),
    "empty": (lambda t: {}, "not a tokenizer ("),
    "panic": (
        lambda t: t | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "not a tokenizer (",
    ),
    "huge id": (
        lambda t: t | {"model": t["model"] | {"vocab": t["model"]["vocab"] | {"zzzz": 4 * 10**9}}},
        "it has the id 4000000000 for ",
    ),
    "no unknown word": (
        lambda t: t | {"model": {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"}},
        "it cannot encode the text 'a' (",
    ),
    "no unknown piece": (
        lambda t: t | {"model": {"type": "Unigram", "unk_id": None, "vocab": [["the", -1.0]]}},
        "it cannot encode the text 'a' (",
    ),
    "unknown token missing": (
        lambda t: t | {"model": t["model"] | {"unk_token": "<no>", "vocab": {"b": 0}, "merges": []}},
        "it cannot encode the text 'a' (",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_tokenizer_is_refused_by_name(change: Callable, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, json.dumps(change(json.loads(byte_level()))))
    with pytest.raises(UserError) as error:
        open_tokenizer(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_text_that_cannot_be_encoded_is_refused_in_one_line(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "cat": 1}, "unk_token": "[UNK]"}
    fields = {"model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    path = saved(tmp_path, json.dumps(json.loads(byte_level()) | fields))
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("a cat") == [0, 1]
    with pytest.raises(UserError) as error:
        tokenizer.encode("a dog\n" * 10)
    assert str(error.value).startswith(f"{path}: it cannot encode the text 'a dog\\na dog\\na dog\\na '… (")
    assert "\n" not in str(error.value)


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    plain = json.loads(byte_level())
    ids = open_tokenizer(saved(tmp_path, json.dumps(plain))).encode("the cat sat on the mat")
    assert len(ids) > 4
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|start|>",
    }  # fmt: skip
    for change in ({"truncation": cut}, {"padding": padding}):
        tokenizer = open_tokenizer(saved(tmp_path, json.dumps(plain | change)))
        assert tokenizer.encode("the cat sat on the mat") == ids
        assert tokenizer.bos_id is None


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, byte_level()[:1000])
    with pytest.raises(UserError, match="truncated or not JSON"):
        open_tokenizer(path)
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        open_tokenizer(tmp_path / "nowhere.json")


def trained_sentencepiece(path: Path, prefix: bool) -> Path:
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES * 4), model_writer=stream, vocab_size=330, model_type="bpe",
            byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
            normalization_rule_name="identity", user_defined_symbols=["<tool>"], num_threads=1,
            minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    return path


def taken_apart(path: Path, prefix: bool) -> dict[str, Any]:
    """A sentencepiece model as GGUF's lists."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    kinds = {"is_unknown": 2, "is_control": 3, "is_unused": 5, "is_byte": 6}
    types = []
    for token in range(model.vocab_size()):
        kind = next((kind for name, kind in kinds.items() if getattr(model, name)(token)), 1)
        types.append(4 if model.id_to_piece(token) == "<tool>" else kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(token) for token in range(model.vocab_size())],
        "tokenizer.ggml.scores": [model.get_score(token) for token in range(model.vocab_size())],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@NEEDS_GGUF
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_model_survives_gguf(prefix: bool, tmp_path: Path) -> None:
    source = trained_sentencepiece(tmp_path / "a.model", prefix)
    original = SentencePieceTokenizer(source)
    metadata = taken_apart(source, prefix)
    found = open_tokenizer(write_gguf(tmp_path / "a.gguf", metadata, {"t": np.zeros(4, np.float32)}))
    for sample in (*TEXTS, "a <tool> b"):
        assert found.encode(sample) == original.encode(sample), sample
        assert found.decode(found.encode(sample)) == original.decode(original.encode(sample))
    assert (found.bos_id, found.end_ids) == (original.bos_id, original.end_ids)
    silent = gguf_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": False}, source)
    assert silent.bos_id is None
    turn = gguf_tokenizer(metadata | {"tokenizer.ggml.eot_token_id": 7}, source)
    assert turn.end_ids == {2, 7}
    assert found.encode_marked("<s>a</s>") == [1, *original.encode("a"), 2]


@NEEDS_GGUF
def test_a_byte_level_model_survives_gguf(tmp_path: Path) -> None:
    fields = json.loads(byte_level())
    original = JsonTokenizer(json.dumps(fields), "here")
    tokens = sorted(fields["model"]["vocab"], key=fields["model"]["vocab"].__getitem__) + ["<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 3), 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in fields["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }  # fmt: skip
    path = write_gguf(tmp_path / "a.gguf", metadata, {"t": np.zeros(4, np.float32)})
    found = open_tokenizer(path)
    for sample in (*TEXTS, "a <tool> b"):
        assert found.encode(sample) == original.encode(sample), sample
        assert found.decode(found.encode(sample)) == original.decode(original.encode(sample))
    assert (found.bos_id, found.end_ids) == (None, {1})
    template = open_chat_template(path)
    assert template is not None
    assert (template.bos, template.eos) == ("<|start|>", "<|end|>")
    digits = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "smollm"}, path)
    assert len(digits.encode("12345")) == 5


BAD_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model": "bert"}, "the tokenizer kind 'bert' is not supported; supported: gpt2, llama"),
    "split": ({"pre": "deepseek-llm"}, "text split 'deepseek-llm' is not supported; supported: default,"),
    "types": ({"token_type": [1]}, "tokenizer.ggml.token_type does not fit 2 tokens"),
    "odd types": ({"token_type": [1, 9]}, "tokenizer.ggml.token_type does not fit 2 tokens"),
    "tokens": ({"tokens": "a"}, "no list tokenizer.ggml.tokens of the expected kind"),
    "twice": ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
    "eos": ({"eos_token_id": 2}, "tokenizer.ggml.eos_token_id is 2, expected an id below 2"),
    "bos flag": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, expected true or false"),
    "merges": ({"merges": ["a b c"]}, "not a tokenizer ("),
    "scores": ({"model": "llama", "scores": [0.5]}, "1 scores for 2 tokens"),
    "no pieces": (
        {"model": "llama", "tokens": [], "token_type": [], "scores": []},
        "its tokenizer is damaged",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_METADATA.values(), ids=BAD_METADATA)
def test_bad_tokenizer_metadata_is_refused_by_name(change: dict, message: str) -> None:
    good = {"model": "gpt2", "tokens": ["a", "b"], "merges": []} | change
    with pytest.raises(UserError) as error:
        gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in good.items()}, Path("a.gguf"))
    assert str(error.value).startswith(f"a.gguf: {message}")
    assert "\n" not in str(error.value)


def test_a_template_is_found_where_it_is_kept(tmp_path: Path) -> None:
    text = byte_level()
    assert open_chat_template(saved(tmp_path, text)) is None
    named = {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}
    names = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}}
    found = open_chat_template(saved(tmp_path, text, tokenizer_config=named | names))
    assert found == ChatTemplate(str(tmp_path), "d", "<|start|>", "<|end|>")
    (tmp_path / "chat_template.jinja").write_text("file")
    found = open_chat_template(saved(tmp_path, text, tokenizer_config={"chat_template": "config"} | names))
    assert found is not None
    assert found.text == "file"
